"""`events.jsonl` read line by line as it grows, and how much of it wandb has been given.

How far that is lies in the run folder, as a number of lines. What a session could not give to wandb, because wandb had
died or the machine had, the next session gives.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from config.files import write_atomically

NOTE_EVERY_S = 5.0

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
        """The lines that were completed since the last call, at most so many."""
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
    """How many lines of the events are safe with wandb, over all sessions."""

    def __init__(self, path: Path) -> None:
        """path: where the number lies."""
        self._path = path
        self._noted_at = -NOTE_EVERY_S
        try:
            self.lines = int(path.read_text())
        except (FileNotFoundError, ValueError):
            self.lines = 0

    def due(self) -> bool:
        """Whether it is time for the next note."""
        return time.monotonic() - self._noted_at > NOTE_EVERY_S

    def note(self, lines: int) -> None:
        """wandb has so many lines."""
        self.lines = lines
        self._noted_at = time.monotonic()
        try:
            write_atomically(self._path, str(self.lines).encode())
        except OSError:
            return  # a full disk; at worst the next session gives some lines again


@contextmanager
def alone(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock file `path`, so that one process at a time feeds wandb from a run folder.

    Waits, since a session that was started right after another ended finds its worker still delivering. Raises
    RuntimeError after `wait_s` seconds. A file system without locks is taken as it is.
    """
    with path.open("ab") as file:
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise RuntimeError(f"another process gives {path.parent} to wandb already") from None
                time.sleep(_RETRY_S)
                continue
            except OSError:
                break
            break
        yield
