"""Markdown of the pages that the tools write. What comes from a run is text in it, never markup, and never a secret."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from config.printable import line, printable, shown
from config.redact import redact

_MARKUP = re.compile(r"[\\`*\[\]<|~]|&(?=[#\w]+;)|(?<![^\W_])_|_(?![^\W_])")
_OPENS_A_BLOCK = re.compile(r"^(\s*)(>|#(?=#*(?:\s|$))|[+-](?=\s|$|-)|=(?==*$)|\d+(?=[.)](?:\s|$)))")
_FENCES = re.compile(r"`+")


def text(value: object) -> str:
    """Any value as text on one line, with what Markdown or HTML would take for markup escaped."""
    escaped = _MARKUP.sub(lambda found: f"\\{found[0]}", shown(value))
    return escaped if escaped[:1].isalpha() else _OPENS_A_BLOCK.sub(_escape_block, escaped)


def code(value: object) -> str:
    """Any value as code within a line."""
    said = shown(value)
    edge = " " if said.startswith("`") or said.endswith("`") or not said.strip() else ""
    fence = _fence(said, 1)
    return f"{fence}{edge}{said}{edge}{fence}"


def fenced(block: str, language: str = "text") -> str:
    """Several lines as a block of code, with a line break at its end."""
    said = printable(redact(block.rstrip()))
    fence = _fence(said, 3)
    return f"{fence}{language}\n{said}\n{fence}\n"


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table, with a line break at its end. Its cells are Markdown; `text` and `code` make it of what a run says."""
    lines = [_row(head), f"|{'---|' * len(head)}", *map(_row, rows)]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(cell: object) -> str:
    """On one line, and without a `|` that would end it, in code too; one that is escaped already stays so."""
    return re.sub(r"\\.|\|", lambda found: "\\|" if found[0] == "|" else found[0], line(str(cell)))


def _fence(said: str, least: int) -> str:
    """Backticks that no run of backticks within `said` ends."""
    return "`" * max(least, 1 + max((len(run) for run in _FENCES.findall(said)), default=0))


def _escape_block(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}\\" if found[2].isdigit() else f"{found[1]}\\{found[2]}"
