"""A file of results, one JSON object a line, which an interruption may have cut short anywhere."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_results(path: Path) -> Iterator[dict[str, Any]]:
    """The results of a file, in order; a line that an interruption has cut short is none."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def keep_result(path: Path, result: dict[str, Any]) -> None:
    """Append a result, on a line of its own also where the one before it was cut short."""
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if whole else "\n") + json.dumps(result) + "\n")
