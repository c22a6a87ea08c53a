"""Write files so that neither a reader nor a crash ever sees half of one."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Put `content` at `path` so that a reader, or a crash, only ever sees the old file or the whole new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write_flushed(aside, content)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    flush(path.parent)  # the rename itself has to survive a power cut


def write_flushed(path: Path, content: bytes) -> None:
    """Write a small file and have it on disk before returning. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flush(path: Path) -> None:
    """Have a file's content or a folder's entries on disk before returning. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
