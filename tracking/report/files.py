"""Files that a command names: run folders by patterns, and the page that --html asks for."""

from __future__ import annotations

from glob import has_magic
from pathlib import Path

from config.errors import UserError
from config.files import write_atomically


def matching(pattern: str) -> list[Path]:
    """Paths that match a glob, sorted; for a pattern without wildcards that path, whether it exists or not."""
    path = Path(pattern).expanduser()
    return sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor)))) if has_magic(pattern) else [path]


def write_page(path: Path, text: str) -> None:
    """Write the page that --html asks for. Raises UserError when it cannot be written."""
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise UserError(f"--html {path}: cannot be written ({error.strerror}); choose another file") from error
