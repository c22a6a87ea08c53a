"""Follow `events.jsonl` as it grows, from its first line, for a limited time per call.

A million lines take seconds to read, so they are read between frames and the screen appears at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import orjson

from config.errors import UserError
from tracking.events import Event, fault_in
from tracking.jsonl import decode

_CHUNK = 1 << 20


class EventTail:
    """The whole lines of a growing file as events, each once.

    An incomplete last line is read again later: a resumed run may have cut it off.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self.damaged = 0
        """Lines that are not a JSON object."""
        self.read_bytes = 0
        """Bytes of the file up to the last whole line that was read."""
        self.at_end = False
        """Whether the last call of `events` reached the end of the file."""

    @property
    def size(self) -> int:
        """Bytes of the file now; 0 without one."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def replaced(self) -> bool:
        """Whether the path now has another file than the one being read, as after a start with run.resume=never."""
        if self._file is None:
            return False
        try:
            now = self._path.stat()
        except OSError:
            return False  # being renamed: the next call decides
        return now.st_ino != os.fstat(self._file.fileno()).st_ino or now.st_size < self.read_bytes

    def events(self, seconds: float) -> Iterator[Event]:
        """The next events, until the current end of the file or for at most `seconds`.

        Raises UserError when the file exists and cannot be read.
        """
        deadline = time.monotonic() + seconds
        self.at_end = False
        while time.monotonic() < deadline:
            lines = self._whole_lines()
            if not lines:
                self.at_end = True
                return
            for line in lines:
                event = _decode(line)
                if event is not None and fault_in(event) is None:
                    yield event
                else:
                    self.damaged += 1

    def _whole_lines(self) -> list[bytes]:
        """About a chunk of lines; none at the end of the file."""
        try:
            if self._file is None:
                if not self._path.exists():
                    return []
                self._file = self._path.open("rb")
            self._file.seek(self.read_bytes)
            text = self._file.read(_CHUNK)
            if b"\n" not in text:
                text += self._file.readline()
        except OSError as error:
            raise UserError(
                f"{self._path}: cannot read the events ({error.strerror}); check its permissions"
            ) from error
        whole = text[: text.rfind(b"\n") + 1]
        self.read_bytes += len(whole)
        return whole.splitlines()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _decode(line: bytes) -> Event | None:
    """As `tracking.jsonl.decode`, which visits every value; only needed for lines with a non-finite number."""
    if b'nan"' in line or b'inf"' in line:
        return decode(line)
    try:
        event = orjson.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
