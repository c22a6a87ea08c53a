"""Handle command-line arguments: run folder patterns, KEY=NUMBER, and the page for --html."""

import math
from collections.abc import Iterable, Sequence
from glob import has_magic
from pathlib import Path

from config.errors import UserError
from config.files import write_atomically


def matching(pattern: str) -> list[Path]:
    """Paths that match a glob, sorted; a pattern without wildcards is returned as a path, existing or not."""
    path = Path(pattern).expanduser()
    return sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor)))) if has_magic(pattern) else [path]


def write_page(path: Path, text: str) -> None:
    """Write the page requested by --html. Raises UserError if it cannot be written."""
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise UserError(f"--html {path}: cannot be written ({error.strerror}); choose another file") from error


def numbers_given(option: str, arguments: Sequence[str], known: Iterable[str], example: str) -> dict[str, float]:
    """Parse KEY=NUMBER `arguments` into key to number. Raises UserError for an unknown key or a bad number."""
    found = {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        if key not in known:
            raise UserError(f"{option} {argument}: unknown key; take one of {', '.join(known)}")
        try:
            found[key] = float(text)
        except ValueError:
            found[key] = math.nan
        if math.isnan(found[key]):
            raise UserError(f"{option} {argument}: {text!r} is not a number; example: {example}")
    return found
