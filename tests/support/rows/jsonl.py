"""Rows in a file."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Write each row as a line of JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def change_jsonl(path: Path, change: Callable[[Any], object]) -> None:
    """Let `change` edit each row of a file in place."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        change(row)
    write_jsonl(path, rows)
