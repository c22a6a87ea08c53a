"""`events.jsonl`: the source of truth about a run, one JSON object per line; how it is written, read and followed.

Each line is one unbuffered write, so a killed process loses nothing and the file can be read while the run continues.
Only a power failure can lose lines; the run's start and end, checkpoints and close() are therefore followed by an fsync
(one per step would cost milliseconds and protect little).

A crash or a full disk can leave an incomplete last line. It is repaired before anything is appended: a line that parses
only lacks its newline, which is added; any other is cut off, since it would make the whole file unreadable to jq,
pandas and others that expect one object per line.
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
from tracking.events import TEXT_FIELDS, Event, fault_in

_FSYNC_AFTER = frozenset({"run_start", "checkpoint", "run_end"})
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_CHUNK = 1 << 16  # bytes that are read at once
_BEGINNING = b'{"event":"'


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
    """The lines of a file from its end. The first is what follows the last newline: empty, or an incomplete line."""
    tail, start = b"", file.seek(0, os.SEEK_END)
    while start > 0:
        size = min(_CHUNK, start)
        start -= size
        file.seek(start)
        tail, *lines = (file.read(size) + tail).split(b"\n")  # the first may begin before this chunk
        yield from reversed(lines)
    yield tail


def decode(line: bytes) -> Event | None:
    """The JSON object on `line`, with floats that were not finite as floats again; None when there is none."""
    try:
        event = json_text.parse(line)
        return restored(event) if isinstance(event, dict) else None
    except (ValueError, RecursionError):
        return None


def event_on(line: bytes) -> Event | None:
    """The event on `line`; None when there is none as docs/run-folder.md has them.

    Many times faster than `decode`; an integer of more than 64 bits, which no event has, comes as a float.
    """
    event: Any
    try:
        event = orjson.loads(line)
        if b'nan"' in line or b'inf"' in line:
            event = restored(event)
    except (ValueError, RecursionError):
        event = decode(line)  # orjson refuses half a surrogate, which the name of a file may have
    return event if isinstance(event, dict) and fault_in(event) is None else None


def beginnings(*kinds: str) -> tuple[bytes, ...]:
    """First bytes of the lines of these kinds of events, which tell them apart without parsing."""
    return tuple(b'%s%s"' % (_BEGINNING, kind.encode()) for kind in kinds)


class Follower:
    """Reads `events.jsonl` line by line, and at the next call what was added meanwhile.

    An incomplete last line is left for the next call: a resumed run may cut it off.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        """offset: [bytes] beginning of the first line to read."""
        self.path = path
        self.offset = offset
        """[bytes] Beginning of the line that is looked at; between two calls, end of the last one that was read."""
        self.number = 0
        """Lines so far."""
        self.damaged = 0
        """Lines that `events` passed over because there is no event on them."""
        self.at_end = False
        """Whether the last call reached the end of the file."""
        self._inode: int | None = None

    def replaced(self) -> bool:
        """Whether the path has another file than the one read so far, as after a start with run.resume=never.

        That file is then read from its start.
        """
        try:
            now = self.path.stat()
        except OSError:
            return False  # being renamed: the next call decides
        if self._inode in (None, now.st_ino) and now.st_size >= self.offset:
            return False
        self.offset = self.number = self.damaged = 0
        self._inode = None
        return True

    def lines(self, *kinds: str, seconds: float = math.inf, whole: bool = False) -> Iterator[bytes]:
        """The new lines without their newline, for at most about `seconds`; none where there is no file.

        kinds: events of other kinds are passed over without being parsed; all come where none is given. whole: the file
        is read once, as it is. It has to exist, and an incomplete last line comes too, after `at_end` was set. Raises
        UserError when the file cannot be read.
        """
        deadline, self.at_end = time.monotonic() + seconds, False
        wanted, rest = beginnings(*kinds), b""
        try:
            with self.path.open("rb") as file:
                self._inode = os.fstat(file.fileno()).st_ino
                file.seek(self.offset)
                while time.monotonic() < deadline and not self.at_end:
                    *lines, rest = (file.read(_CHUNK) + file.readline()).split(b"\n")
                    offset, number = self.offset, self.number
                    for line in lines:
                        number += 1
                        if not wanted or line.startswith(wanted) or not line.startswith(_BEGINNING):
                            self.offset, self.number = offset, number
                            yield line
                        offset += len(line) + 1
                    self.offset, self.number = offset, number
                    self.at_end = not lines or bool(rest)
                    lines.clear()  # before the next ones are read
        except OSError as error:
            self.at_end = isinstance(error, FileNotFoundError)
            if whole or not self.at_end:
                reason = f"cannot read the events ({error.strerror})"
                raise UserError(f"{self.path}: {reason}; is this a run folder that you may read?") from error
        if whole and rest:
            self.number += 1
            yield rest

    def events(self, *kinds: str, seconds: float = math.inf, whole: bool = False) -> Iterator[Event]:
        """The events on `lines`, of `kinds` alone where kinds are given; a line without one is counted in `damaged`."""
        for line in self.lines(*kinds, seconds=seconds, whole=whole):
            event = event_on(line)
            if event is None:
                self.damaged += 1
            elif not kinds or event["event"] in kinds:
                yield event

    def refuse(self, line: bytes, what: str = "an event as docs/run-folder.md has them") -> None:
        """Raise UserError: the line that is looked at is damaged. An incomplete last one is left out without a word."""
        if not self.at_end:
            raise UserError(f"{self.path}: line {self.number} is not {what}: {line[:60]!r}; remove that line")
