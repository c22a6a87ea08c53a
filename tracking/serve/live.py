"""A whole run from its `events.jsonl`, read once and then as it grows."""

from __future__ import annotations

import threading
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from config.errors import UserError
from tracking.heatmap.grid import USED, Heat, HeatCollector
from tracking.jsonl import Follower, beginnings, event_on
from tracking.run_facts import Collector, RunFacts
from tracking.serve.skim import steps_at

SOON = 1 << 26
"""Bytes that are read while the reader of a page waits."""
_MEASURED = beginnings(*USED)
PLACES = 1000
"""Steps of a sketch."""


class LiveRun:
    """The facts and heat maps of one run so far. May be used from several threads."""

    def __init__(self, folder: Path, label: str) -> None:
        self.folder, self.label = folder, label
        self._file = Follower(folder / "events.jsonl")
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._reset()

    def _reset(self) -> None:
        self._collector, self._heat = Collector(), HeatCollector()
        self._facts: RunFacts | None = None
        self._heat_now: Heat | None = None

    def ready(self) -> bool:
        """Whether all but the newest of its events were read; if not, they are being read from now on."""
        if self._file.path.stat().st_size - self._file.offset <= SOON:
            return True
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._read_quietly, daemon=True, name="reading a run")
            self._reader.start()
        return False

    def _read_quietly(self) -> None:
        with suppress(UserError), self._lock:  # whoever asks for the facts is told
            self._update()

    def facts(self) -> RunFacts:
        """The run so far, without config and environment. Raises UserError when it cannot be read."""
        with self._lock:
            self._update()
            if self._facts is None:
                facts = self._collector.facts(self.label, str(self.folder), self._file.path)
                columns = deepcopy(facts.columns)  # the arrays grow
                rare = {kind: list(events) for kind, events in facts.rare_events.items()}
                self._facts = replace(facts, columns=columns, rare_events=rare)
            return self._facts

    def heat(self) -> Heat:
        """Its heat maps so far. Raises UserError when it cannot be read."""
        with self._lock:
            self._update()
            if self._heat_now is None:
                self._heat_now = self._heat.heat()
            return self._heat_now

    def _update(self) -> None:
        if self._file.replaced():
            self._reset()
        for line in self._file.lines():
            self._collector.take(line, self._file.offset)
            if line.startswith(_MEASURED) and (event := event_on(line)) is not None:
                self._heat.add(event)
            self._facts = self._heat_now = None


def sketch(folder: Path, label: str) -> RunFacts:
    """A run from its steps at even places alone, without rare events: at once, whatever its length. Raises OSError."""
    collector = Collector()
    for event in steps_at(folder / "events.jsonl", PLACES):
        collector.add(event)
    return collector.facts(label, str(folder), None)
