"""How both audits say what they found: findings with what is named of each, sections of lines, and files."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from config.errors import UserError
from config.files import write_atomically


def show(
    heads: Iterable[str], findings: Iterable[tuple[str, Mapping[str, str]]], sections: Mapping[str, Iterable[str]]
) -> None:
    """Print heads, findings and the sections that have lines, wrapped at the terminal's width."""
    columns = min(100, max(60, shutil.get_terminal_size((80, 24)).columns))
    fill = partial(textwrap.fill, width=columns, break_long_words=False, break_on_hyphens=False)
    for head in heads:
        print(fill(head))
    for says, named in findings:
        print(f"\n{fill(says)}")
        for name, text in named.items():
            if text:
                print(fill(text, initial_indent=f"  {name + ':':<10}", subsequent_indent=" " * 12))
    for heading, lines in sections.items():
        found = [fill(line, initial_indent="  - ", subsequent_indent="    ") for line in lines]
        if found:
            print("\n".join([f"\n{heading}", *found]))


def write(option: str, path: Path | None, content: bytes) -> None:
    """Write what an option asks for, where it does. Raises UserError."""
    if path is not None:
        try:
            write_atomically(path, content)
        except OSError as error:
            raise UserError(f"{option} {path}: cannot be written: {error.strerror or error}") from error
