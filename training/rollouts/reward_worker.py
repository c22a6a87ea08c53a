"""The process that runs reward functions: one line of JSON in, one line out. It imports the standard library alone.

`rewards.py` starts it in the folder of the run, so that a user's module is found. What a function prints goes to the
standard error. Functions that ship are at the end of this file.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Function = Callable[..., Sequence[Any]]


def main() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path[0] = str(Path.cwd())  # in place of this file's folder, whose modules are no user's
    for line in sys.stdin:
        try:
            found = _answer(json.loads(line))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    function = find(request["function"])
    if "arguments" not in request:
        path = Path(sys.modules[function.__module__].__file__ or "")
        return {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    given = seen(request["arguments"])
    found = list(function(**request["arguments"]))
    if len(found) != len(given):
        raise ValueError(f"returned {len(found)} rewards for {len(given)} completions")
    return {"rewards": [None if value is None else float(value) for value in found], "seen": given}


def seen(arguments: dict[str, Any]) -> list[list[str]]:
    """Two digests for each answer: of the row that a function is given with it, and of its tokens."""
    row = {name: values for name, values in arguments.items() if name not in ("completions", "completion_ids")}
    rows = ({name: values[k] for name, values in row.items()} for k in range(len(arguments["completions"])))
    return [[digest(own), digest(ids)] for own, ids in zip(rows, arguments["completion_ids"], strict=True)]


def digest(value: Any) -> str:
    """SHA-256 of a value as JSON, which is the same on both sides of the pipe."""
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

if __name__ == "__main__":
    main()
