"""Write, read and follow `events.jsonl`: the source of truth about a run, one JSON object per line.

Each line is one unbuffered write, so a killed process loses nothing and the file can be read while the run continues.
Only a power failure can lose lines, so the run's start and end, checkpoints and close() are followed by an fsync (one
per step would cost milliseconds and protect little).

A crash or a full disk can leave an incomplete last line. It is repaired before anything is appended: a line that parses
only lacks its newline, which is added; any other is cut off, because it would make the whole file unreadable to jq,
pandas and other tools that expect one object per line.
"""

import errno
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from config import json_text
from config.errors import UserError
from config.printable import tell
from tracking.events import TEXT_FIELDS, Event, fault_in

_FSYNC_AFTER = frozenset({"run_start", "checkpoint", "run_end"})
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_CHUNK = 1 << 16  # bytes per read
_BEGINNING = b'{"event":"'


def encode(event: Event) -> bytes:
    """The event as one line, newline included. Raises TypeError for a value that JSON lacks (paths become text)."""
    return json.dumps(plain(event), allow_nan=False, separators=(",", ":"), default=_text).encode() + b"\n"


def plain(value: Any) -> Any:
    """`value` with every non-finite float, at any depth, replaced by the string "inf", "-inf" or "nan"."""
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


def restored(value: Any) -> Any:
    """The inverse of `plain`; the fields in TEXT_FIELDS stay strings."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, list):
        return [restored(item) for item in value]
    if isinstance(value, dict):
        return {key: item if key in TEXT_FIELDS else restored(item) for key, item in value.items()}
    return value


class JsonlSink:
    """Appends events to one file. Raises OSError if a write fails; a later one may succeed."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending and repair an incomplete last line. Raises UserError if it cannot be opened."""
        self.path = path
        try:
            self._file: BinaryIO = path.open("ab+", buffering=0)
            self._size = _repair(self._file)
        except OSError as error:
            reason = f"cannot write the events ({error.strerror or error})"
            raise UserError(f"{path}: {reason}; free space there, or choose another run.dir") from error

    def write(self, event: Event) -> None:
        """Append one event; a failed write leaves no part of it in the file."""
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
            try:
                os.fsync(self._file.fileno())
            except OSError as error:  # the event is in the file, and counted as lost if this were raised
                tell(f"{self.path}: its newest events may not survive a power failure ({error.strerror or error})")

    def close(self) -> None:
        """Fsync and close the file."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def _repair(file: BinaryIO) -> int:
    """Complete or cut off a last line without newline; returns the resulting size of the file in bytes."""
    incomplete = next(lines_backwards(file))
    size = file.seek(0, os.SEEK_END)
    if not incomplete:
        return size
    if decode(incomplete) is not None:
        file.write(b"\n")
        return size + 1
    file.truncate(size - len(incomplete))
    return size - len(incomplete)


def lines_backwards(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, last to first, starting with what follows the final newline: empty or an incomplete line."""
    tail, start = b"", file.seek(0, os.SEEK_END)
    while start > 0:
        size = min(_CHUNK, start)
        start -= size
        file.seek(start)
        tail, *lines = (file.read(size) + tail).split(b"\n")  # the first may begin before this chunk
        yield from reversed(lines)
    yield tail


def decode(line: bytes) -> Event | None:
    """The JSON object on `line`, with non-finite floats restored; None if there is none."""
    try:
        event = json_text.parse(line)
        return restored(event) if isinstance(event, dict) else None
    except (ValueError, RecursionError):
        return None


def event_on(line: bytes) -> Event | None:
    """The event on `line`; None if there is none in the format of docs/run-folder.md.

    Much faster than `decode`; integers beyond 64 bits, which no event has, become floats.
    """
    event: Any
    try:
        event = orjson.loads(line)
        if b'nan"' in line or b'inf"' in line:
            event = restored(event)
    except (ValueError, RecursionError):
        event = decode(line)  # orjson rejects lone surrogates, which file names may contain
    return event if isinstance(event, dict) and fault_in(event) is None else None


def beginnings(*kinds: str) -> tuple[bytes, ...]:
    """Line prefixes of these kinds of events, which identify them without parsing."""
    return tuple(b'%s%s"' % (_BEGINNING, kind.encode()) for kind in kinds)


class Follower:
    """Reads `events.jsonl` line by line; each call continues with what was added since the last.

    An incomplete last line is left for the next call, since a resumed run may cut it off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """[bytes] End of the last line read."""
        self.number = 0
        """Number of lines read so far."""
        self.at_end = False
        """Whether the last call reached the end of the file."""
        self._inode: int | None = None

    def replaced(self) -> bool:
        """Whether the path is now a different file than the one read so far, as after a start with run.resume=never.

        If so, reading restarts at the beginning of the new file.
        """
        try:
            now = self.path.stat()
        except OSError:
            return False  # being renamed; the next call will tell
        if self._inode in (None, now.st_ino) and now.st_size >= self.offset:
            return False
        self.offset = self.number = 0
        self._inode = None
        return True

    def lines(self, *kinds: str, seconds: float = math.inf, whole: bool = False) -> Iterator[bytes]:
        """The new lines, without newlines, for at most about `seconds`; none if there is no file.

        kinds: skip other kinds of events without parsing them; default: all. whole: the file is read once, as it is: it
        has to exist, and an incomplete last line is yielded too, after `at_end` was set. Raises UserError if the file
        cannot be read.
        """
        deadline, self.at_end = time.monotonic() + seconds, False
        wanted, rest = beginnings(*kinds), b""
        try:
            with self.path.open("rb") as file:
                self._inode = os.fstat(file.fileno()).st_ino
                file.seek(self.offset)
                while time.monotonic() < deadline and not self.at_end:
                    *lines, rest = (file.read(_CHUNK) + file.readline()).split(b"\n")
                    for line in lines:
                        self.number += 1
                        self.offset += len(line) + 1
                        if not wanted or line.startswith(wanted) or not line.startswith(_BEGINNING):
                            yield line
                    self.at_end = not lines or bool(rest)
                    lines.clear()  # free them before the next read
        except OSError as error:
            self.at_end = isinstance(error, FileNotFoundError)
            if whole or not self.at_end:
                reason = f"cannot read the events ({error.strerror})"
                raise UserError(f"{self.path}: {reason}; is this a run folder that you may read?") from error
        if whole and rest:
            self.number += 1
            yield rest

    def events(self, *kinds: str, whole: bool = False) -> Iterator[Event]:
        """The events on `lines`, only of `kinds` if any are given; lines without an event are skipped."""
        for event in map(event_on, self.lines(*kinds, whole=whole)):
            if event is not None and (not kinds or event["event"] in kinds):
                yield event

    def refuse(self, line: bytes, what: str = "an event as docs/run-folder.md has them") -> None:
        """Raise UserError because the current line is damaged; an incomplete last line is silently ignored."""
        if not self.at_end:
            raise UserError(f"{self.path}: line {self.number} is not {what}: {line[:60]!r}; remove that line")
