"""A terminal that shows everything from a run as text, without markup, emoji codes, escape sequences or secrets."""

import textwrap
from typing import Any

from rich.console import Console
from rich.text import Text

from config.printable import shown


def console(*, columns: int = 0, **options: Any) -> Console:
    """A console that prints text verbatim. columns: minimum width for files and pipes. options: for rich's Console."""
    found = Console(**{"highlight": False, "markup": False, "emoji": False, **options})
    if not found.is_terminal:
        found.width = max(found.width, columns)
    return found


def words(value: object, style: str = "") -> Text:
    """Any value as one line of text."""
    return Text(shown(value), style=style)


def paragraph(text: str, screen: Console, style: str = "") -> Text:
    """Text wrapped between words on a terminal, with later lines indented; unwrapped in a file, for searching."""
    if screen.is_terminal:
        later = " " * (len(text) - len(text.lstrip()) + 2)
        text = textwrap.TextWrapper(screen.width, "", later, break_long_words=False, break_on_hyphens=False).fill(text)
    return Text(text, style)
