"""Read a run from its folder, and keep reading as it grows, for the server's pages and the terminal."""

import math
import os
import threading
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from config.errors import UserError
from tracking.heatmap.grid import USED, Heat, HeatCollector
from tracking.jsonl import Follower, beginnings, event_on, lines_backwards
from tracking.run_dir import RunDir
from tracking.run_facts import Collector, RunFacts
from tracking.status import run_status
from tracking.summary import read_inputs

SOON = 1 << 26
"""Maximum number of bytes to read while a page waits for its answer."""
_BETWEEN = 100  # maximum number of lines to search for a step
_MEASURED = beginnings(*USED)
(_STEP,) = beginnings("step")


class LiveRun:
    """The facts and heat maps of one run so far. Thread-safe."""

    def __init__(self, folder: Path, label: str, *, whole: bool = True) -> None:
        """whole: False skips heat maps and per-step columns, for an overview of many runs."""
        self.folder, self.label, self._whole = folder, label, whole
        self._file = Follower(folder / "events.jsonl")
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._inputs: dict[str, Any] = {}
        self._inputs_seen: tuple[int, ...] = ()
        self._reset()

    def _reset(self) -> None:
        self._collector, self._heat = Collector(columns=self._whole), HeatCollector()
        self._facts: RunFacts | None = None
        self._heat_now: Heat | None = None
        self.damaged = 0
        """Number of lines without an event."""

    def ready(self) -> bool:
        """Whether at most SOON bytes are unread; if not, start reading them in a thread."""
        if self._file.path.stat().st_size - self._file.offset <= SOON:
            return True
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._read_quietly, daemon=True, name="reading a run")
            self._reader.start()
        return False

    def _read_quietly(self) -> None:
        with suppress(UserError):  # raised again when the facts are requested
            self.read()

    def read(self, seconds: float = math.inf) -> float:
        """Read new events for at most about `seconds`; returns the share of the file read so far.

        Raises UserError if it cannot be read.
        """
        with self._lock:
            if self._file.replaced():
                self._reset()
            for line in self._file.lines(seconds=seconds):
                self.damaged += not self._collector.take(line)
                if self._whole and line.startswith(_MEASURED) and (event := event_on(line)) is not None:
                    self._heat.add(event)
                self._facts = self._heat_now = None
            path, offset = self._file.path, self._file.offset
            return 1.0 if self._file.at_end or not path.exists() else min(1.0, offset / max(1, path.stat().st_size))

    def events(self) -> RunFacts:
        """Facts of the run as read so far, without config and environment."""
        with self._lock:
            if self._facts is None:
                facts = self._collector.facts(self.label, str(self.folder), self._file.path)
                columns = deepcopy(facts.columns)  # the arrays grow
                rare = {kind: list(events) for kind, events in facts.rare_events.items()}
                self._facts = replace(facts, columns=columns, rare_events=rare)
            return self._facts

    def facts(self) -> RunFacts:
        """Facts of the run as read so far, with its config, DeepSpeed JSON, environment and status.

        Raises UserError if one of these files cannot be read; they are reread when they change.
        """
        run_dir = RunDir(self.folder)
        files = (run_dir.config, run_dir.deepspeed_config, run_dir.environment)
        seen = tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in files)
        if seen != self._inputs_seen:
            self._inputs, self._inputs_seen = read_inputs(run_dir), seen
        return replace(self.events(), **self._inputs, checked=run_status(self.folder))

    def known_facts(self) -> RunFacts:
        """The facts that can be read: those of the three files are left out if one is damaged or being written."""
        try:
            return self.facts()
        except UserError:
            return replace(self.events(), checked=run_status(self.folder))

    def heat(self) -> Heat:
        """Heat maps of the run as read so far."""
        with self._lock:
            if self._heat_now is None:
                self._heat_now = self._heat.heat()
            return self._heat_now


def sketch(folder: Path, label: str, places: int = 1000) -> RunFacts:
    """Facts from steps sampled evenly over the file, without rare events; fast for any length. Raises OSError."""
    collector, lines = Collector(), list[bytes]()
    with (folder / "events.jsonl").open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for place in range(places):
            file.seek(size * place // places)
            file.readline()  # the rest of a line that began earlier
            lines += islice((line for line in islice(file, _BETWEEN) if line.startswith(_STEP)), 1)
        lines += islice((line for line in lines_backwards(file) if line.startswith(_STEP) and event_on(line)), 1)
    events = [event for line in lines if (event := event_on(line)) is not None]
    for event in {(event["step"], event["time"]): event for event in events}.values():
        collector.add(event)
    return collector.facts(label, str(folder), None)
