"""`events.jsonl`: the source of truth about a run, one JSON object per line.

Each line is one unbuffered write, so a killed process loses nothing and the file can be read while the run continues.
Only a power failure can lose lines; the run's start and end, checkpoints and close() are therefore followed by an fsync
(one per step would cost milliseconds and protect little).

A crash or a full disk can leave an incomplete last line. It is repaired before anything is appended: a line that parses
only lacks its newline, which is added; any other is cut off, since it would make the whole file unreadable to jq,
pandas and others that expect one object per line.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from config import json_text
from config.errors import UserError
from tracking.events import TEXT_FIELDS, Event, fault_in

_FSYNC_AFTER = frozenset({"run_start", "checkpoint", "run_end"})
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_TAIL_CHUNK = 1 << 16


def encode(event: Event) -> bytes:
    """One line, newline included. Raises TypeError for a value that is no JSON type (a path is written as text)."""
    return json.dumps(plain(event), allow_nan=False, separators=(",", ":"), default=_text).encode() + b"\n"


def plain(value: Any) -> Any:
    """`value` with every float that is not finite, at any depth, as the string "inf", "-inf" or "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _text(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be part of an event: {value!r}; pass plain numbers and text")


def _restore_floats(value: Any) -> Any:
    """The inverse of `plain`; the fields in TEXT_FIELDS stay strings."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, list):
        return [_restore_floats(item) for item in value]
    if isinstance(value, dict):
        return {key: item if key in TEXT_FIELDS else _restore_floats(item) for key, item in value.items()}
    return value


class JsonlSink:
    """Appends events to one file. Raises OSError when a write fails; the next may succeed."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending and repair an incomplete last line. Raises UserError when it cannot be opened."""
        self.path = path
        try:
            self._file: BinaryIO = path.open("ab+", buffering=0)
            self._size = _repair(self._file)
        except OSError as error:
            reason = f"cannot write the events ({error.strerror or error})"
            raise UserError(f"{path}: {reason}; free space there, or choose another run.dir") from error

    def write(self, event: Event) -> None:
        """Append one event. On failure nothing of it stays in the file."""
        line = encode(event)
        written = 0
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += written
        if event["event"] in _FSYNC_AFTER:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Fsync and close the file."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def _repair(file: BinaryIO) -> int:
    """Complete or cut off a last line without newline; returns the size of the file in bytes afterwards."""
    incomplete = _after_last_newline(file)
    size = file.seek(0, os.SEEK_END)
    if not incomplete:
        return size
    if decode(incomplete) is not None:
        file.write(b"\n")
        return size + 1
    file.truncate(size - len(incomplete))
    return size - len(incomplete)


def _after_last_newline(file: BinaryIO) -> bytes:
    """The bytes after the last newline; empty for a complete last line. Reads from the end, in chunks."""
    tail, start = b"", file.seek(0, os.SEEK_END)
    while start > 0 and b"\n" not in tail:
        step = min(_TAIL_CHUNK, start)
        start -= step
        file.seek(start)
        tail = file.read(step) + tail
    return tail.rpartition(b"\n")[2]


def decode(line: bytes) -> Event | None:
    """The event on `line`, with floats that were not finite as floats again; None when it is no JSON object."""
    try:
        event = json_text.parse(line)
        return _restore_floats(event) if isinstance(event, dict) else None
    except (ValueError, RecursionError):
        return None


def open_events(path: Path) -> BinaryIO:
    """Open `path` for reading. Raises UserError when it cannot be opened."""
    try:
        return path.open("rb", buffering=1 << 20)
    except OSError as error:
        raise UserError(f"{path}: cannot read the events ({error.strerror}); is this a run folder?") from error


def read_events(path: Path) -> Iterator[Event]:
    """Every event of `path` in file order, in bounded memory; floats that were not finite are floats again.

    An incomplete last line (a crash, or a run that is writing) is left out. Raises UserError when the file cannot be
    opened or another line is damaged.
    """
    with open_events(path) as file:
        for number, line in enumerate(file, start=1):
            event = decode(line)
            if event is not None:
                yield event
            elif line.endswith(b"\n"):
                raise UserError(f"{path}: line {number} is not a JSON object: {line[:60]!r}; remove that line")


def read_run_events(path: Path) -> Iterator[Event]:
    """`read_events` of a run. Raises UserError also for a line that is no event as docs/run-folder.md has them."""
    for number, event in enumerate(read_events(path), start=1):
        fault = fault_in(event)
        if fault is not None:
            raise UserError(f"{path}: event {number} {fault}; remove that line")
        yield event


def surviving(events: Iterable[Event]) -> list[Event]:
    """The events of the one history that led to the run's present state: the last attempt at a step wins.

    A resumed or rolled-back run attempts some steps again. What an abandoned attempt recorded is dropped, together
    with every step that came after it, since none of those updates is part of the weights any more. `run_start`,
    `run_end`, `incident`, `nonfinite`, `corruption`, `reexecution` and `note` belong to the session and not to the
    run's state, and always stay.
    """
    kept: list[Event] = []
    newest_step = -1  # index in `kept` of the newest step event
    for event in events:
        if event["event"] == "run_start":
            kept = [old for old in kept if not _is_state(old) or old["step"] <= event["step"]]
            newest_step = _last_step_index(kept)
        elif event["event"] == "step":
            if newest_step >= 0 and event["step"] <= kept[newest_step]["step"]:
                # Events after the newest step event may already belong to the new attempt at this very step.
                kept = [
                    old
                    for index, old in enumerate(kept)
                    if not _is_state(old) or old["step"] < event["step"] + (index > newest_step)
                ]
            newest_step = len(kept)
        kept.append(event)
    return kept


def _is_state(event: Event) -> bool:
    return event["event"] in ("step", "scale", "eval", "checkpoint")


def _last_step_index(events: list[Event]) -> int:
    return max((index for index, event in enumerate(events) if event["event"] == "step"), default=-1)
