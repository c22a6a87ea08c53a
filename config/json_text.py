"""JSON of files that may be damaged or written by hand, and JSON sealed with its own hash to detect changes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from config.errors import UserError, one_line


def parse(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for invalid JSON, or nesting too deep for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def object_in(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing or damaged, or holds something else."""
    try:
        found = parse(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The object in a hand-written JSON file, no key repeated. what: its kind, for the error. Raises UserError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise UserError(f"{path}: {key} is given twice in one object; remove one of them")
            found[key] = value
        return found

    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as a {what}: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds {json.dumps(found)[:80]} where a JSON object is expected")
    return found


def sealed(content: dict[str, Any]) -> str:
    """The text of a sealed file: `content` and, last, the SHA-256 of its canonical JSON."""
    return json.dumps({**content, "sha256": _seal(content)}, indent=1) + "\n"


def json_sha256(value: Any, *, sort_keys: bool = False) -> str:
    """SHA-256, in hexadecimal, of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=sort_keys).encode()).hexdigest()


def unsealed(text: bytes) -> tuple[dict[str, Any], bool]:
    """The content of a sealed file, and whether the seal matches. Raises ValueError for other files."""
    try:
        content = parse(text)
        seal = content.pop("sha256")
        return content, bool(seal == _seal(content))
    except (KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError("is no sealed JSON object") from None


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
