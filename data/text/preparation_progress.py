"""Progress of a preparation, displayed by the process that prepares or by one that waits for it.

Only one rank may draw, which need not be the one that holds the lock. So the preparing process writes its state to a
small file in its partial folder, and a waiting process that displays progress reads it there.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

from config import json_text, printable

_FILE = "progress.json"
_WORDS = {"tokenizer": "making the tokenizer for", "ids": "copying the tokens of"}
_SECONDS_BETWEEN_WRITES = 0.25
_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_EQUAL_LINES = 60.0


@dataclass(frozen=True)
class Progress:
    """State of a preparation."""

    stage: str
    """"tokenizer" while that is made, then "tokens", or "ids" where the source is tokenized already."""
    done_bytes: int
    """[bytes] Text tokenized so far, or ids copied."""
    total_bytes: int | None
    """[bytes] Size of the source, duplicates and unreadable files included; None when unknown."""


class Display:
    """A progress bar on a terminal, elsewhere a plain line every five seconds, or minute where it says nothing new."""

    def __init__(self, label: str, *, shown: bool) -> None:
        self._label, self._shown = printable.shown(label), shown
        self._console = Console(stderr=True, markup=False, emoji=False)
        self._bar: RichProgress | None = None
        self._start = time.monotonic()
        self._line, self._printed = "", 0.0

    def __enter__(self) -> Display:
        if self._shown and self._console.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
            )
            self._bar = RichProgress(*columns, TimeElapsedColumn(), console=self._console)
            self._bar.add_task(f"preparing {self._label}", total=None)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Progress | None) -> None:
        """Draw a state; None (unknown yet) draws nothing."""
        if not self._shown or progress is None:
            return
        what = _WORDS.get(progress.stage, "tokenizing")
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0],
                description=f"{what} {self._label}",
                completed=progress.done_bytes,
                total=progress.total_bytes,
            )
        else:
            total = f" of {progress.total_bytes / 1e6:.1f}" if progress.total_bytes else ""
            done = f", {progress.done_bytes / 1e6:.1f}{total} MB" if progress.done_bytes else ""
            self._print(f"data: {what} {self._label}{done}")

    def _print(self, line: str) -> None:
        between = _SECONDS_BETWEEN_EQUAL_LINES if line == self._line else _SECONDS_BETWEEN_LINES
        if not self._line or time.monotonic() >= self._printed + between:
            self._line, self._printed = line, time.monotonic()
            print(line, file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Log that the corpus is prepared, and after how long."""
        if self._shown:
            seconds = time.monotonic() - self._start
            self._console.print(f"data: prepared {self._label} in {seconds:.1f} s", highlight=False, soft_wrap=True)


class ProgressFile:
    """Sends a preparation's state to its own display and, through a file, to waiting processes."""

    def __init__(self, folder: Path, display: Display) -> None:
        self._path, self._display = folder / _FILE, display
        self._next_write = 0.0

    def __enter__(self) -> ProgressFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._path.unlink(missing_ok=True)

    def __call__(self, progress: Progress) -> None:
        self._display.show(progress)
        if time.monotonic() >= self._next_write:
            self._next_write = time.monotonic() + _SECONDS_BETWEEN_WRITES
            aside = self._path.with_suffix(".new")
            aside.write_text(json.dumps(asdict(progress)), encoding="utf-8")
            aside.replace(self._path)


def read_progress(corpus_folder: Path) -> Progress | None:
    """State of the process that prepares this corpus; None without one."""
    for path in corpus_folder.parent.glob(f"{corpus_folder.name}.partial-*/{_FILE}"):
        try:
            return Progress(**json_text.parse(path.read_bytes()))
        except (OSError, ValueError, TypeError):
            # It finished between listing the folder and reading the file, or is damaged.
            return None
    return None
