"""Read `events.jsonl` line by line as it grows, and keep how many lines wandb has stored.

That number is a file in the run folder. What a session could not deliver, because wandb or the machine died, the next
session delivers.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from config.files import write_atomically

SAVE_EVERY_S = 5.0

_RETRY_S = 0.2


class Line(NamedTuple):
    """One whole line of the events."""

    number: int
    """Counted from 1: wandb's own step counter, which never goes back."""
    text: bytes


class Follower:
    """Reads the whole lines of a growing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._number = 0

    def new_lines(self, most: int = 10_000) -> list[Line]:
        """The lines that were completed since the last call, at most `most`."""
        if self._file is None:
            if not self._path.exists():
                return []
            self._file = self._path.open("rb")
        lines: list[Line] = []
        while len(lines) < most:
            start = self._file.tell()
            text = self._file.readline()
            if not text.endswith(b"\n"):
                self._file.seek(start)  # still being written: wait for the rest
                break
            self._number += 1
            lines.append(Line(self._number, text))
        return lines


class Delivered:
    """How many lines of the events wandb has stored, over all sessions."""

    def __init__(self, path: Path) -> None:
        """path: the file of the number."""
        self._path = path
        self._saved_at = -SAVE_EVERY_S
        try:
            self.lines = int(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            self.lines = 0

    def due(self) -> bool:
        """Whether it is time to save again."""
        return time.monotonic() - self._saved_at > SAVE_EVERY_S

    def save(self, lines: int) -> None:
        """wandb has stored so many lines."""
        self.lines = lines
        self._saved_at = time.monotonic()
        try:
            write_atomically(self._path, str(self.lines).encode())
        except OSError:
            return  # a full disk; at worst the next session delivers some lines again


@contextmanager
def exclusive_lock(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock file `path`, so that only one process delivers a run folder to wandb.

    Waits, since the worker of a session that just ended may still be delivering. Raises RuntimeError after `wait_s`
    seconds. On a file system without locks it does nothing.
    """
    with path.open("ab") as file:
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise RuntimeError(f"another process is already delivering {path.parent} to wandb") from None
                time.sleep(_RETRY_S)
                continue
            except OSError:
                break
            break
        yield
