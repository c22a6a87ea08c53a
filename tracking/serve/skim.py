"""A run's line in the overview: the rare events, what its verdict rests on, and its curve at a few places.

Each part of the file is read once, and telemetry passed over. The curve is of steps at evenly spaced places.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson

from tracking.events import Event
from tracking.figures import followed
from tracking.jsonl import Follower, beginnings, event_on, lines_backwards
from tracking.run_facts import Collector, RunFacts
from tracking.verdict import Evidence

POINTS, PLACES = 60, 1000
"""Places at which the curve of an overview, and of a sketch, is read."""
_NEAR = 1 << 14
_FAR = 1 << 20  # telemetry of a large model lies between two steps
(_STEP,) = beginnings("step")
_RARE = ("run_start", "run_end", "nonfinite", "incident", "eval", "warning", "corruption", "note")
_MOST_EVENTS = 2000  # of one kind that are kept


@dataclass
class Skim:
    """Overview of one `events.jsonl` so far."""

    start: Event = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """Events by kind; incidents also as `incident SKIP` and so on."""
    last: Event = field(default_factory=dict)
    """The newest `step` event; empty before the first."""
    evals: list[Event] = field(default_factory=list)
    evidence: Evidence = field(default_factory=Evidence)
    """The verdict's evidence, which grows with the file."""
    followed: str = "loss"
    """The metric that `curve` has."""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """(step, value) at about POINTS places, in step order; a value that is not finite is nan."""


class Skimmer:
    """Skims one growing file; `update` reads what is new."""

    def __init__(self, path: Path) -> None:
        self._file = Follower(path)
        self._seen: tuple[int, int, int] | None = None
        self.skim = Skim()
        """Replaced, not changed, by `update`."""

    def update(self) -> bool:
        """Read what is new; whether anything was. Raises OSError or UserError when the file cannot be read."""
        now = self._file.path.stat()
        seen = (now.st_ino, now.st_size, now.st_mtime_ns)
        if seen == self._seen:
            return False
        old = Skim() if self._file.replaced() else self.skim
        skim = replace(old, counts=Counter(old.counts), evals=list(old.evals))
        for line in self._file.lines(*_RARE, "step"):
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                if line.startswith(_STEP):
                    skim.evidence.add(orjson.loads(line))
                elif (event := event_on(line)) is not None:
                    _add(skim, event)
        steps = steps_at(self._file.path, POINTS)
        skim.curve, skim.last = _surviving(steps), steps[-1] if steps else {}
        skim.followed = followed(skim.last)[0] if steps else "loss"
        self._seen, self.skim = seen, skim
        return True


def _add(skim: Skim, event: Event) -> None:
    kind = event["event"]
    skim.counts[kind] += 1
    skim.evidence.add(event)
    if kind == "run_start":
        skim.start = event
        skim.evals = [old for old in skim.evals if old["step"] <= event["step"]]
    elif kind == "incident":
        skim.counts[f"incident {event['verdict']}"] += 1
    elif kind == "eval" and len(skim.evals) < _MOST_EVENTS:
        skim.evals.append(event)


def _surviving(steps: Iterable[Event]) -> list[tuple[int, float]]:
    kept: list[tuple[int, float]] = []
    for event in steps:  # a resumed run attempts some steps again: the later line is valid
        while kept and kept[-1][0] >= event["step"]:
            kept.pop()
        kept.append((event["step"], followed(event)[1]))
    return kept


def sketch(folder: Path, label: str) -> RunFacts:
    """A run from its steps at even places alone, without rare events: at once, whatever its length. Raises OSError."""
    collector = Collector()
    for event in steps_at(folder / "events.jsonl", PLACES):
        collector.add(event)
    return collector.facts(label, str(folder), None)


def steps_at(path: Path, places: int) -> list[Event]:
    """Steps at `places` evenly spaced offsets and the newest one, in file order without repeats. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        found = [_step_at(file.fileno(), size * place // places, size) for place in range(places)]
    with path.open("rb") as file:
        found.append(next((event for line in lines_backwards(file) if (event := _step_on(line))), None))
    return list({(event["step"], event["time"]): event for event in found if event is not None}.values())


def _step_at(handle: int, place: int, size: int) -> Event | None:
    """The first step event on a line that begins after `place`."""
    for reach in (_NEAR, _FAR):
        text = os.pread(handle, min(reach, size - place), place)
        at = 0 if place == 0 and text.startswith(_STEP) else text.find(b"\n" + _STEP) + 1
        if (at or text.startswith(_STEP)) and (end := text.find(b"\n", at)) > 0:
            return _step_on(text[at:end])
    return None


def _step_on(line: bytes) -> Event | None:
    return event_on(line) if line.startswith(_STEP) else None
