"""Build the tools' Markdown text, tables and pages; tables also render in a terminal.

Values from a run always end up as text, never as markup, and secrets are hidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from config.printable import line, printable, shown
from config.redact import redact

if TYPE_CHECKING:
    from rich.table import Table as Grid

_MARKUP = re.compile(r"[\\`*\[\]<|~]|&(?=[#\w]+;)|(?<![^\W_])_|_(?![^\W_])")
_OPENS_A_BLOCK = re.compile(r"^(\s*)(>|#(?=#*(?:\s|$))|[+-](?=\s|$|-)|=(?==*$)|\d+(?=[.)](?:\s|$)))")
_FENCES = re.compile(r"`+")
_NUMBER = re.compile(r"[-+.]*\d|-$")


def text(value: object) -> str:
    """Any value as text on one line, with Markdown and HTML markup escaped."""
    escaped = _MARKUP.sub(lambda found: f"\\{found[0]}", shown(value))
    return escaped if escaped[:1].isalpha() else _OPENS_A_BLOCK.sub(_escape_block, escaped)


def code(value: object) -> str:
    """Any value as inline code."""
    said = shown(value)
    edge = " " if said.startswith("`") or said.endswith("`") or not said.strip() else ""
    fence = _fence(said, 1)
    return f"{fence}{edge}{said}{edge}{fence}"


def fenced(block: str, language: str = "text") -> str:
    """Lines of text as a fenced code block."""
    said = printable(redact(block.rstrip()))
    fence = _fence(said, 3)
    return f"{fence}{language}\n{said}\n{fence}"


def page(*blocks: object) -> str:
    """Join blocks of Markdown with blank lines, without empty blocks, ending in a newline.

    A list of strings becomes a bulleted list.
    """
    whole = [
        "\n".join(f"- {point}" for point in block) if isinstance(block, list) else str(block or "").strip("\n")
        for block in blocks
    ]
    return "".join(f"{block}\n\n" for block in whole if block)[:-1]


def section(title: str, *blocks: object) -> str:
    """Blocks, as for `page`, under a heading; empty if all of them are."""
    body = page(*blocks)
    return f"## {title}\n\n{body}" if body else ""


class Table:
    """Rows under a header. As a string it is Markdown, so cells have to be Markdown too, as from `text` and `code`.

    In a terminal a cell may be any value or a rich `Text`, and columns of numbers are right-aligned.
    """

    def __init__(self, head: Sequence[object], rows: Iterable[Iterable[object]] = (), *, title: str = "") -> None:
        self.head, self.title = head, title
        self.rows: list[tuple[Sequence[object], str]] = [(tuple(row), "") for row in rows]

    def __bool__(self) -> bool:
        return bool(self.rows)

    def add(self, *cells: object, style: str = "") -> None:
        """Add a row. style: for terminals, such as `bold red`."""
        self.rows.append((cells, style))

    def __str__(self) -> str:
        return "\n".join([_row(self.head), f"|{'---|' * len(self.head)}", *(_row(cells) for cells, _ in self.rows)])

    def padded(self) -> str:
        """Markdown whose columns also line up as plain text; empty without rows."""
        if not self.rows:
            return ""
        rows = [[_cell(cell) for cell in cells] for cells in (self.head, *(cells for cells, _ in self.rows))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [_row([cell.ljust(width) for cell, width in zip(row, widths, strict=True)]) for row in rows]
        return "\n".join([lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]])

    def lines(self) -> list[str]:
        """Plain text, one line per row, under the header unless it is empty."""
        head = [self.head] if any(self.head) else []
        rows = [[shown(cell) for cell in cells] for cells in (*head, *(cells for cells, _ in self.rows))]
        aligned = []
        for column, right in zip(zip(*rows, strict=True), self._right(), strict=bool(rows)):
            width = max(map(len, column))
            aligned.append([cell.rjust(width) if right else cell.ljust(width) for cell in column])
        return ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]

    def grid(self, *, boxed: bool = True) -> Grid:
        """The table for a rich console. rich is imported only here, because some tools start without it."""
        from rich.table import Table as Grid
        from rich.text import Text

        from tracking.terminal import words

        grid = Grid(title=words(self.title) if self.title else None, title_justify="left", title_style="bold")
        grid.show_header = any(self.head)
        if not boxed:
            grid.box, grid.pad_edge, grid.header_style = None, False, "dim"
        for name, right in zip(self.head, self._right(), strict=True):
            grid.add_column(words(name), justify="right" if right else "left", no_wrap=right, overflow="fold")
        for cells, style in self.rows:
            grid.add_row(*(cell if isinstance(cell, Text) else words(cell) for cell in cells), style=style)
        return grid

    def _right(self) -> list[bool]:
        """Mask of columns that hold only numbers, or dashes for missing ones."""
        columns = zip(*(cells for cells, _ in self.rows), strict=True) if self.rows else ((),) * len(self.head)
        said = [[str(cell) for cell in column if str(cell)] for column in columns]
        return [bool(column) and all(map(_NUMBER.match, column)) for column in said]


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(cell: object) -> str:
    """A cell on one line. Every `|` is escaped, even inside code, since it would end the cell."""
    return re.sub(r"\\.|\|", lambda found: "\\|" if found[0] == "|" else found[0], line(str(cell)))


def _fence(said: str, least: int) -> str:
    """A fence of at least `least` backticks, longer than any run of backticks in `said`."""
    return "`" * max(least, 1 + max((len(run) for run in _FENCES.findall(said)), default=0))


def _escape_block(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}\\" if found[2].isdigit() else f"{found[1]}\\{found[2]}"
