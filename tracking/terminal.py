"""A terminal on which what comes from a run is text: no markup, no emoji codes, no escape sequences, no secrets."""

import textwrap
from typing import Any

from rich.console import Console
from rich.text import Text

from config.printable import shown


def console(*, columns: int = 0, **options: Any) -> Console:
    """A console that prints text as it is. columns: at least, for a file or a pipe. options: as for rich's Console."""
    found = Console(**{"highlight": False, "markup": False, "emoji": False, **options})
    if not found.is_terminal:
        found.width = max(found.width, columns)
    return found


def words(value: object, style: str = "") -> Text:
    """Any value as text of one line."""
    return Text(shown(value), style=style)


def paragraph(text: str, screen: Console, style: str = "") -> Text:
    """Text broken between words at a terminal's width, later lines indented; whole in a file, which is searched."""
    if screen.is_terminal:
        later = " " * (len(text) - len(text.lstrip()) + 2)
        text = textwrap.TextWrapper(screen.width, "", later, break_long_words=False, break_on_hyphens=False).fill(text)
    return Text(text, style)
