"""Progress of a preparation, displayed by the process that prepares or by one that waits for it.

Only one rank may print, and it need not be the one that holds the lock, so the preparing process writes its line to a
small file in its partial folder, and a waiting process that displays progress reads it there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from config.files import write_atomically
from config.printable import shown

_FILE = "progress"
_SECONDS_BETWEEN_WRITES = 0.25
_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_EQUAL_LINES = 60.0


class Display:
    """A line every five seconds, or every minute if it has not changed."""

    def __init__(self, label: str, *, active: bool) -> None:
        self.label, self._active = shown(label), active
        self._start = time.monotonic()
        self._line, self._printed = "", 0.0

    def show(self, line: str) -> None:
        """Print a line, unless one was printed just before."""
        between = _SECONDS_BETWEEN_EQUAL_LINES if line == self._line else _SECONDS_BETWEEN_LINES
        if self._active and line and (not self._line or time.monotonic() >= self._printed + between):
            self._line, self._printed = line, time.monotonic()
            print(line, file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Log that the corpus is prepared, and after how long."""
        if self._active:
            seconds = time.monotonic() - self._start
            print(f"data: prepared {self.label} in {seconds:.1f} s", file=sys.stderr, flush=True)


class ProgressFile:
    """Sends a preparation's state to its own display and, through a file, to waiting processes."""

    def __init__(self, folder: Path, display: Display) -> None:
        self._path, self._display = folder / _FILE, display
        self._next_write = 0.0

    def __enter__(self) -> ProgressFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._path.unlink(missing_ok=True)

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None:
        """what: the current work, such as "tokenizing". done, total: [bytes]; None if the total is unknown."""
        of_total = f" of {total / 1e6:.1f}" if total else ""
        line = f"data: {what} {self._display.label}" + (f", {done / 1e6:.1f}{of_total} MB" if done else "")
        self._display.show(line)
        if time.monotonic() >= self._next_write:
            self._next_write = time.monotonic() + _SECONDS_BETWEEN_WRITES
            write_atomically(self._path, line.encode(), flushed=False)


def read_progress(corpus_folder: Path) -> str:
    """The progress line of the process that prepares this corpus; empty if there is none."""
    for path in corpus_folder.parent.glob(f"{corpus_folder.name}.partial-*/{_FILE}"):
        try:
            return path.read_text(encoding="utf-8")
        except OSError:  # it finished between listing the folder and reading the file
            break
    return ""
