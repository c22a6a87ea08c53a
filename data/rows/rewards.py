"""Reward functions, run in worker processes, one group of answers at a time, each with a time limit.

An exception, a time-out, a value that is not finite or a dead process gives no reward (NaN) and is counted; no function
can end the run. The processes do not import torch; what a function prints goes to stderr.
"""

import asyncio
import importlib
import json
import math
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from config.errors import UserError
from config.files import file_sha256
from config.json_text import json_sha256
from config.schema import GrpoSection
from data.text.workers import WorkerDied, Workers

Function = Callable[..., Sequence[Any]]
Reward = tuple[float, tuple[str, ...] | None]
"""A function's value, NaN for none; and its name with what its process has `seen` of the answer, None if it failed."""


class Rewards:
    def __init__(self, section: GrpoSection) -> None:
        """Raises UserError for a function that cannot be loaded."""
        self._section = section
        self.names = section.rewards
        self.weights = np.array(section.reward_weights or [1.0] * len(self.names))
        self.problems = set[str]()  # why there was no reward for the latest answers, which the texts may quote
        self._workers = Workers(section.reward_workers, answering, self.names)
        self.close = self._workers.close
        self.sources = {name: self._source(name) for name in self.names}  # hash of each function's file and options

    def _source(self, name: str) -> str:
        try:
            return json_sha256([self._workers.submit((name, None), 60.0).result(), self._section.reward_options])
        except (WorkerDied, RuntimeError, TypeError) as problem:  # TypeError: an option that JSON has no form for
            self.close()
            fix = "give module:function, or exact_match, regex, json_schema or length"
            raise UserError(f"grpo.rewards = {name}: cannot be loaded ({problem}); {fix}") from None

    @property
    def labels(self) -> list[str]:
        """Short names of the functions, with their module where two have one name."""
        short = [name.rpartition(":")[2] for name in self.names]
        whole = [Path(name).name.replace(".py:", ".").replace(":", ".") for name in self.names]
        return [own if short.count(own) == 1 else long for own, long in zip(short, whole, strict=True)]

    def of(self, groups: Sequence[dict[str, Any]]) -> list[list[Reward]]:
        """For each function the rewards of all answers. groups: arguments for the answers to each prompt."""
        submit, seconds = self._workers.submit, self._section.reward_seconds
        self.problems = set()
        asked = [[(name, group, submit((name, group), seconds)) for group in groups] for name in self.names]
        return [[reward for parts in by_group for reward in self._by_answer(*parts)] for by_group in asked]

    def _by_answer(self, name: str, group: dict[str, Any], future: Future[Any]) -> Iterator[Reward]:
        try:
            for value, given in future.result():
                yield value if math.isfinite(value) else math.nan, (name, *given)
        except (WorkerDied, RuntimeError, OSError) as problem:  # OSError: no other process can be started
            self.problems.add(f"{name}: {problem}")
            yield from [(math.nan, None)] * len(group["completions"])

    def total(self, rewards: np.ndarray) -> np.ndarray:
        """(..., functions) -> (...): weighted sum over the functions that gave one; NaN where none did."""
        return np.where(np.isnan(rewards).all(-1), np.nan, np.nansum(rewards * self.weights, axis=-1))


def answering(names: Sequence[str]) -> Callable[[tuple[str, dict[str, Any] | None]], Any]:
    """Set up a new process and import these functions; returns what answers its requests."""
    os.setsid()  # so that what a function starts is killed with the process
    multiprocessing.current_process().daemon = False  # a daemon could start no processes
    os.dup2(2, 1)
    sys.path.insert(0, str(Path.cwd()))
    for name in names:
        with suppress(Exception):  # the first request reports it
            find(name)
    return _answer


def _answer(request: tuple[str, dict[str, Any] | None]) -> Any:
    """Reward and `seen` of each answer; without arguments the SHA-256 of the function's file. Raises RuntimeError."""
    name, arguments = request
    try:
        function = find(name)
        if arguments is None:
            return file_sha256(Path(sys.modules[function.__module__].__file__ or ""))
        given, values = seen(arguments), function(**arguments)
        values = asyncio.run(values) if asyncio.iscoroutine(values) else values
        found = [math.nan if value is None else float(value) for value in values]
        if len(found) != len(given):
            raise ValueError(f"returned {len(found)} rewards for {len(given)} completions")
        return list(zip(found, given, strict=True))
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None  # an error of the user's might not unpickle


def seen(arguments: dict[str, Any]) -> list[tuple[str, str]]:
    """Two digests for each answer: of the row that comes with it, and of its tokens and text."""
    columns = dict(arguments)
    answers = zip(columns.pop("completion_ids"), columns.pop("completions"), strict=True)
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    return [(json_sha256(row), json_sha256(answer)) for row, answer in zip(rows, answers, strict=True)]


def find(name: str) -> Function:
    """The function that grpo.rewards names. Raises whatever its import raises."""
    module, _, attribute = name.rpartition(":")
    if not module:
        return SHIPPED[name]
    if module.endswith(".py"):
        path = Path(module).expanduser().resolve()
        sys.path[:] = dict.fromkeys([str(path.parent), *sys.path])
        if (other := getattr(importlib.import_module(path.stem), "__file__", None)) != str(path):
            raise ImportError(f"{other or 'a part of Python'} is a module of the same name; rename the file")
        module = path.stem
    found: Function = getattr(importlib.import_module(module), attribute)
    return found


def _scores(completions: Sequence[Any], column: Sequence[Any], holds: Callable[[str, Any], bool]) -> list[float | None]:
    """1 for each completion, a text or messages, that `holds` for its row's column, else 0; None where that is null."""
    texts = [said if isinstance(said, str) else "".join(part["content"] or "" for part in said) for said in completions]
    return [None if wanted is None else float(holds(said, wanted)) for said, wanted in zip(texts, column, strict=True)]


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where the completion equals the column `answer`, apart from white space at both ends, else 0."""
    return _scores(completions, answer, lambda said, wanted: said.strip() == str(wanted).strip())


def regex(completions: Sequence[Any], regex: Sequence[str | None], **_: Any) -> list[float | None]:
    """1 where the regular expression in the column `regex` matches somewhere in the completion, else 0."""
    return _scores(completions, regex, lambda said, wanted: re.search(wanted, said) is not None)


def json_schema(completions: Sequence[Any], schema: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where the completion is JSON valid under the schema in the column `schema` (an object or its text), else 0."""
    from jsonschema import validators

    def fits(said: str, wanted: Any) -> bool:
        wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
        try:
            return bool(validators.validator_for(wanted)(wanted).is_valid(json.loads(said, parse_constant=_refuse)))
        except (ValueError, RecursionError, OverflowError):  # nested too deep; a number beyond float
            return False

    return _scores(completions, schema, fits)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def length(completion_ids: Sequence[list[int]], longest: Sequence[int], slack: Sequence[int], **_: Any) -> list[float]:
    """0 up to `longest` - `slack` tokens, then falling to -1 at `longest` (Yu et al. 2025, DAPO, equation 13)."""
    rows = zip(completion_ids, longest, slack, strict=True)
    return [-min(1.0, max(0.0, (len(ids) - most + room) / max(room, 1))) for ids, most, room in rows]


SHIPPED: dict[str, Function] = {each.__name__: each for each in (exact_match, regex, json_schema, length)}
