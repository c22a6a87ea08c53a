"""Rewards of answers, by functions that run in processes of their own, group by group, each with a time limit.

An exception, a time-out, a value that is no finite number or a process that dies gives no reward (NaN), and is counted:
no function ends the run, or makes it wait for longer than `grpo.reward_seconds`. The processes do not import torch;
what a function prints goes to the standard error. Functions that ship are at the end.
"""

import hashlib
import importlib
import json
import math
import multiprocessing
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np

from config.errors import UserError
from config.schema import GrpoSection
from data.text.workers import WorkerDied, Workers

Function = Callable[..., Sequence[Any]]
Reward = tuple[float, tuple[str, ...] | None]
"""A function's value, NaN for none, and what it was given with the answer: its name, then `seen` in its process; None
where it did not answer."""
_START_SECONDS = 60.0
"""Time to find a function."""


class Rewards:
    """The functions of `grpo.rewards`."""

    def __init__(self, section: GrpoSection) -> None:
        """Raises UserError for a function that cannot be loaded."""
        self._section = section
        self.names = section.rewards
        self.weights = np.array(section.reward_weights or [1.0] * len(self.names))
        self.problems: Counter[str] = Counter()
        """Why answers got no reward, how often."""
        self._workers = Workers(section.reward_workers, answering, self.names)
        self.sources = {name: self._source(name) for name in self.names}
        """sha256 of the file of each function."""

    def _source(self, name: str) -> str:
        try:
            return str(self._workers.submit((name, None), _START_SECONDS).result())
        except (WorkerDied, RuntimeError) as problem:
            self.close()
            fix = "give module:function, or exact_match, regex, json_schema or length"
            raise UserError(f"grpo.rewards = {name}: cannot be loaded ({problem}); {fix}") from None

    def of(self, groups: Sequence[dict[str, Any]]) -> list[list[Reward]]:
        """Rewards of all answers by each function. groups: the arguments for the answers to each prompt."""
        seconds, found = self._section.reward_seconds, list[list[Reward]]()
        asked = [[self._workers.submit((name, group), seconds) for group in groups] for name in self.names]
        for name, futures in zip(self.names, asked, strict=True):
            parts = map(self._by_answer, repeat(name), groups, futures)
            found.append(list(chain.from_iterable(parts)))
        return found

    def _by_answer(self, name: str, group: dict[str, Any], future: Future[Any]) -> list[Reward]:
        try:
            pairs = future.result()
        except (WorkerDied, RuntimeError) as problem:
            self.problems[f"{name}: {problem}"] += 1
            return [(math.nan, None)] * len(group["completions"])
        return [(value if math.isfinite(value) else math.nan, (name, *given)) for value, given in pairs]

    def total(self, rewards: np.ndarray) -> np.ndarray:
        """(..., functions) -> (...): weighted sum over the functions that gave one; NaN where none did."""
        found = np.nansum(rewards * self.weights, axis=-1)
        return np.where(np.isnan(rewards).all(-1), np.nan, found)

    def close(self) -> None:
        """End all processes."""
        self._workers.close()


def answering(names: Sequence[str]) -> Callable[[tuple[str, dict[str, Any] | None]], Any]:
    """In a new process: what it applies to requests for the functions of these names."""
    os.setsid()  # it is killed with what a function has started
    multiprocessing.current_process().daemon = False  # or a function could start none
    os.dup2(2, 1)
    sys.path.insert(0, str(Path.cwd()))
    for name in names:
        with suppress(Exception):  # which the first request reports
            find(name)
    return _answer


def _answer(request: tuple[str, dict[str, Any] | None]) -> Any:
    """Reward and `seen` of each answer; without arguments the SHA-256 of the function's file. Raises RuntimeError."""
    name, arguments = request
    try:
        function = find(name)
        if arguments is None:
            return hashlib.sha256(Path(sys.modules[function.__module__].__file__ or "").read_bytes()).hexdigest()
        given = seen(arguments)
        found = [math.nan if value is None else float(value) for value in function(**arguments)]
        if len(found) != len(given):
            raise ValueError(f"returned {len(found)} rewards for {len(given)} completions")
        return list(zip(found, given, strict=True))
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None  # which every process can read


def seen(arguments: dict[str, Any]) -> list[tuple[str, str]]:
    """Two digests for each answer: of the row that a function is given with it, and of its tokens and text."""
    answers = list(zip(arguments["completion_ids"], arguments["completions"], strict=True))
    row = {name: values for name, values in arguments.items() if name not in ("completions", "completion_ids")}
    return [(digest({name: values[k] for name, values in row.items()}), digest(own)) for k, own in enumerate(answers)]


def digest(value: Any) -> str:
    """SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def find(name: str) -> Function:
    """The function that grpo.rewards names. Raises what its import does."""
    module, _, attribute = name.rpartition(":")
    if not module:
        return SHIPPED[name]
    if module.endswith(".py"):
        path = Path(module).expanduser().resolve()
        sys.path[1:1] = [str(path.parent)] * (str(path.parent) not in sys.path)
        module = path.stem
    found: Function = getattr(importlib.import_module(module), attribute)
    return found


def _scores(completions: Sequence[Any], column: Sequence[Any], holds: Callable[[str, Any], bool]) -> list[float | None]:
    """1 where a completion, a text or messages, holds for the column of its row, else 0; None where that is null."""
    texts = [said if isinstance(said, str) else "".join(part["content"] or "" for part in said) for said in completions]
    pairs = zip(texts, column, strict=True)
    return [None if wanted is None else float(holds(text, wanted)) for text, wanted in pairs]


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where the completion is the column `answer`, white space at both ends aside, else 0."""
    return _scores(completions, answer, lambda said, wanted: said.strip() == str(wanted).strip())


def regex(completions: Sequence[Any], regex: Sequence[str | None], **_: Any) -> list[float | None]:
    """1 where the regular expression in the column `regex` is found in the completion, else 0."""
    return _scores(completions, regex, lambda said, wanted: re.search(wanted, said) is not None)


def json_schema(completions: Sequence[Any], schema: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where the completion is JSON that fits the JSON schema in the column `schema`, an object or its text."""
    from jsonschema import validators

    def fits(said: str, wanted: Any) -> bool:
        wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
        try:
            return bool(validators.validator_for(wanted)(wanted).is_valid(json.loads(said)))
        except ValueError:
            return False

    return _scores(completions, schema, fits)


def length(
    completion_ids: Sequence[Sequence[int]], longest: Sequence[int], slack: Sequence[int], **_: Any
) -> list[float]:
    """0 up to `longest` - `slack` tokens, then falling to -1 at `longest` (Yu et al. 2025, DAPO, equation 13)."""
    rows = zip(completion_ids, longest, slack, strict=True)
    return [-min(1.0, max(0.0, (len(ids) - most + room) / max(room, 1))) for ids, most, room in rows]


SHIPPED: dict[str, Function] = {each.__name__: each for each in (exact_match, regex, json_schema, length)}
