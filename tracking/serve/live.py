"""A whole run from its `events.jsonl`, read once and then as it grows."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson

from tracking.events import fault_in
from tracking.heatmap.grid import Heat, HeatCollector, event_on, is_used
from tracking.jsonl import decode
from tracking.run_facts import Collector, Columns, RunFacts
from tracking.serve.skim import steps_at

_CHUNK = 1 << 22
SOON = 1 << 26
"""Bytes that are read while the reader of a page waits."""
PLACES = 1000
"""Steps of a sketch."""
_TELEMETRY = (b'{"event":"telemetry"', b'{"event": "telemetry"')


class LiveRun:
    """The facts and heat maps of one run so far. May be used from several threads."""

    def __init__(self, folder: Path, label: str) -> None:
        self.folder, self.label = folder, label
        self.damaged = 0
        """Lines that are no event."""
        self._path = folder / "events.jsonl"
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._reset()

    def _reset(self) -> None:
        self._collector, self._heat = Collector(), HeatCollector()
        self._read, self._inode = 0, -1
        self._facts: RunFacts | None = None
        self._heat_now: Heat | None = None

    def ready(self) -> bool:
        """Whether all but the newest of its events were read; if not, they are being read from now on."""
        if self._path.stat().st_size - self._read <= SOON:
            return True
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._read_quietly, daemon=True, name="reading a run")
            self._reader.start()
        return False

    def _read_quietly(self) -> None:
        with suppress(OSError), self._lock:  # whoever asks for the facts is told
            self._update()

    def facts(self) -> RunFacts:
        """The run so far, without config and environment. Raises OSError when it cannot be read."""
        with self._lock:
            self._update()
            if self._facts is None:
                facts = self._collector.facts(self.label, str(self.folder), self._path)
                # copies, since the arrays grow
                columns = Columns(**{name: np.array(values) for name, values in vars(facts.columns).items()})
                rare = {kind: list(events) for kind, events in facts.rare_events.items()}
                self._facts = replace(facts, columns=columns, rare_events=rare)
            return self._facts

    def heat(self) -> Heat:
        """Its heat maps so far. Raises OSError when it cannot be read."""
        with self._lock:
            self._update()
            if self._heat_now is None:
                self._heat_now = self._heat.heat()
            return self._heat_now

    def _update(self) -> None:
        with self._path.open("rb", buffering=0) as file:
            stat = self._path.stat()
            if stat.st_ino != self._inode or stat.st_size < self._read:
                self._reset()
                self._inode = stat.st_ino
            file.seek(self._read)
            rest = b""
            while chunk := file.read(_CHUNK):
                lines = (rest + chunk).split(b"\n")
                rest = lines.pop()
                for line in lines:
                    self._add(line)
                    self._read += len(line) + 1
                self._facts = self._heat_now = None

    def _add(self, line: bytes) -> None:
        if line.startswith(_TELEMETRY):
            event = event_on(line)
            self._collector.skip("telemetry")
        else:
            event = self._add_to_collector(line)
        if event is None:
            self.damaged += 1
        elif is_used(line):
            self._heat.add(event)

    def _add_to_collector(self, line: bytes) -> dict | None:
        try:
            event = orjson.loads(line)
            if event["event"] != "step":
                event = decode(line)
                if event is None or fault_in(event) is not None:
                    return None
            self._collector.add(event, self._read)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return None
        return event


def sketch(folder: Path, label: str) -> RunFacts:
    """A run from its steps at even places alone, without rare events: at once, whatever its length. Raises OSError."""
    collector = Collector()
    for event in steps_at(folder / "events.jsonl", PLACES):
        collector.add(event)
    return collector.facts(label, str(folder), None)
