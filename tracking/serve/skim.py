"""A run's line in the overview without reading all of its steps: the rare events, and the loss at a few places.

The rare events are found by the bytes at the start of their lines, each part of the file once. Steps are read at evenly
spaced places of the file, so a run of a million steps costs as many reads as one of a thousand.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tracking.events import Event, fault_in
from tracking.jsonl import decode

POINTS = 60
"""Places at which the loss is read."""
_CHUNK = 1 << 22
_NEAR = 1 << 14
_FAR = 1 << 20  # telemetry of a large model lies between two steps
_LINE = b'\n{"event":'
_STEP = b'{"event":"step"'
_COMMON = (_STEP, b'{"event":"telemetry"')
_MOST_EVENTS = 2000  # of one kind that are kept


@dataclass
class Skim:
    """What was found in one `events.jsonl` so far."""

    start: Event = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """Events by kind; incidents also as `incident SKIP` and so on."""
    last: Event = field(default_factory=dict)
    """The newest `step` event; empty before the first."""
    evals: list[Event] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss) at about POINTS places, in step order; a loss that is not finite is nan."""
    first_time: float | None = None


class Skimmer:
    """Skims one growing file; `update` reads what is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._seen: tuple[int, int, int] | None = None
        self.skim = Skim()
        """Replaced, not changed, by `update`."""

    def update(self) -> bool:
        """Read what is new; whether anything was. Raises OSError when the file cannot be read."""
        with self._path.open("rb", buffering=0) as file:
            now = os.fstat(file.fileno())
            seen = (now.st_ino, now.st_size, now.st_mtime_ns)
            if seen == self._seen:
                return False
            same = self._seen is not None and self._seen[0] == now.st_ino and now.st_size >= self._read
            if not same:
                self._read = 0
            old = self.skim if same else Skim()
            skim = Skim(old.start, Counter(old.counts), old.last, list(old.evals), [], old.first_time)
            for line in self._rare_lines(file.fileno()):
                _add(skim, line)
            skim.losses, skim.last = _steps(file.fileno(), self._read, skim.last)
        self._seen, self.skim = seen, skim
        return True

    def _rare_lines(self, handle: int) -> Iterator[bytes]:
        """Whole lines from where reading stopped that are no step and no telemetry."""
        while True:
            text = os.pread(handle, _CHUNK, self._read)
            end = text.rfind(b"\n") + 1
            if not end:
                if len(text) < _CHUNK:
                    return
                text = os.pread(handle, 16 * _CHUNK, self._read)  # a line larger than a chunk
                end = text.find(b"\n") + 1
                if not end:
                    return
            at = 0 if text.startswith(_LINE[1:]) else text.find(_LINE, 0, end) + 1
            while 0 <= at < end and text.startswith(_LINE[1:], at):
                if not text.startswith(_COMMON, at):
                    yield text[at : text.find(b"\n", at)]
                following = text.find(_LINE, at, end)
                if following < 0:
                    break
                at = following + 1
            self._read += end


def _add(skim: Skim, line: bytes) -> None:
    event = decode(line)
    if event is None or fault_in(event) is not None:
        return
    kind = event["event"]
    skim.counts[kind] += 1
    if skim.first_time is None:
        skim.first_time = event["time"]
    if kind == "run_start":
        skim.start = event
        skim.evals = [old for old in skim.evals if old["step"] <= event["step"]]
    elif kind == "incident":
        skim.counts[f"incident {event['verdict']}"] += 1
    elif kind == "eval" and len(skim.evals) < _MOST_EVENTS:
        skim.evals.append(event)


def _steps(handle: int, size: int, last: Event) -> tuple[list[tuple[int, float]], Event]:
    """(step, loss) at even places of the first `size` bytes, and the newest step."""
    found = [event for event in (_step_at(handle, size * place // POINTS, size) for place in range(POINTS)) if event]
    newest = _newest_step(handle, size) or last
    found.append(newest)
    kept: list[Event] = []
    for event in found:  # a resumed run attempts some steps again: the later line is valid
        while kept and event and kept[-1]["step"] >= event["step"]:
            kept.pop()
        kept += [event] if event else []
    nan = float("nan")
    losses = [(event["step"], nan if event["loss"] is None else float(event["loss"])) for event in kept]
    return losses, newest


def steps_at(path: Path, places: int) -> list[Event]:
    """The steps at so many even places of a file, in file order, each once. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        found = [_step_at(file.fileno(), size * place // places, size) for place in range(places)]
        found.append(_newest_step(file.fileno(), size))
    return list({(event["step"], event["time"]): event for event in found if event is not None}.values())


def _step_at(handle: int, place: int, size: int) -> Event | None:
    """The first step event on a line that begins after `place`."""
    for reach in (_NEAR, _FAR):
        text = os.pread(handle, min(reach, size - place), place)
        at = 0 if place == 0 and text.startswith(_STEP) else text.find(b"\n" + _STEP) + 1
        if (at or text.startswith(_STEP)) and (end := text.find(b"\n", at)) > 0:
            return _usable(text[at:end])
    return None


def _newest_step(handle: int, size: int) -> Event | None:
    for reach in (_NEAR, _FAR):
        text = os.pread(handle, min(reach, size), max(0, size - reach))
        at = text.rfind(b"\n" + _STEP) + 1
        if at or text.startswith(_STEP):
            end = text.find(b"\n", at)
            return _usable(text[at : end if end > 0 else len(text)])
    return None


def _usable(line: bytes) -> Event | None:
    event = decode(line)
    return event if event is not None and event.get("event") == "step" and fault_in(event) is None else None


def gaps(losses: list[tuple[int, float]]) -> int:
    """Steps between two of the places, at most: what the overview does not see."""
    return max((after[0] - before[0] for before, after in pairwise(losses)), default=0)
