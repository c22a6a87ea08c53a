"""The current state of a run, updated event by event, in memory that does not grow with the run."""

from __future__ import annotations

import math
from collections import Counter, deque
from pathlib import Path
from statistics import median

from config.printable import line
from tracking.events import Event, describe_event
from tracking.figures import followed
from tracking.verdict import Evidence
from tracking.watch.series import Series

_RECENT_STEPS = 50  # the speed and the ETA are medians over these
_MAX_LINES = 200
_LOGGED = {"nonfinite": "bad", "incident": "bad", "checkpoint": "good", "warning": "warn", "fault": "warn"}
"""Level by event of those that are always logged."""
_CURVES = ("loss", "grad_norm", "loss_scale", "tokens_per_second", "lr")


class WatchState:
    """A run up to its newest event. The last attempt at a step counts."""

    def __init__(self) -> None:
        self.start: Event | None = None
        self.end: Event | None = None
        self.newest: Event | None = None
        self.sessions = 0
        self.step = 0
        self.tokens = 0
        self.time: float | None = None
        """[seconds since the epoch] Time of the newest event."""
        self.session_time: float | None = None
        self.followed = "loss"
        """The name of the curve: the loss, or the headline metric."""
        self.curves = {name: Series() for name in _CURVES}
        self.validation = Series()
        self.skips = Series()
        self.nonfinite_losses = 0
        self.evidence = Evidence()
        """The verdict's evidence."""
        self.counts: Counter[tuple[str, str]] = Counter()
        """Events over all sessions, by (event, kind): ("incident", "SKIP"), ("scale", "overflow") and so on."""
        self.causes: Counter[str] = Counter()
        """Number of inf or nan findings by module, for the first few hundred modules."""
        self.checkpoint: Event | None = None
        self.validated: Event | None = None
        self.flop_share: dict[str, float] = {}
        self.memory_bytes = 0
        self.log: deque[tuple[int, str, str]] = deque(maxlen=_MAX_LINES)
        """(step, level, text), oldest first; level: good, plain, warn or bad."""
        self._recent: deque[Event] = deque(maxlen=_RECENT_STEPS)

    def add(self, event: Event) -> None:
        """Add the next event. One that lacks a required field is left out."""
        handler = getattr(self, f"_on_{event['event']}", None)
        try:
            self.time = event["time"]
            self.evidence.add(event)
            if event["event"] in _LOGGED:
                self._log(event, _LOGGED[event["event"]])
            if handler is not None:
                handler(event)
        except (KeyError, TypeError, AttributeError, ValueError):
            self.counts["damaged", event["event"]] += 1

    @property
    def step_seconds(self) -> float | None:
        """Median duration of the newest steps."""
        return median(event["step_seconds"] for event in self._recent) if self._recent else None

    @property
    def tokens_per_second(self) -> float | None:
        """Median speed of the newest steps, all ranks together."""
        return median(event["tokens_per_second"] for event in self._recent) if self._recent else None

    def eta_seconds(self, planned: int | None) -> float | None:
        """Remaining steps times the median duration, without evaluations and saves. None when it is unknown."""
        if planned is None or self.step_seconds is None or self.end is not None:
            return None
        return max(0, planned - self.step) * self.step_seconds

    def _cut(self, step: int) -> None:
        for series in (*self.curves.values(), self.validation, self.skips):
            series.cut(step)
        self.step = step

    def _log(self, event: Event, level: str, text: str | None = None) -> None:
        self.log.append((event["step"], level, " ".join(line(text or describe_event(event)).split())))

    def _on_run_start(self, event: Event) -> None:
        self.start, self.end = event, None
        self.sessions += 1
        self.session_time = event["time"]
        self._recent.clear()
        self._cut(event["step"])
        if self.sessions > 1:
            self._log(event, "plain", f"restarted, session {self.sessions}")

    def _on_step(self, event: Event) -> None:
        step = event["step"]
        if step <= self.step and self.newest is not None:
            self._cut(step - 1)
        self.followed, main = followed(event)
        for name in _CURVES:
            value = main if name == "loss" else event[name]
            if value is not None:
                self.curves[name].add(step, value)
        if not math.isfinite(event["loss"]):
            self.nonfinite_losses += 1
        if not event["applied"]:
            self.skips.add(step, 1.0)
        self.step, self.tokens, self.newest = step, event["tokens"], event
        self.memory_bytes = max(self.memory_bytes, event["memory_bytes"] or 0)
        self._recent.append(event)

    def _on_scale(self, event: Event) -> None:
        self.counts["scale", event["reason"]] += 1
        if event["from"] != event["to"]:
            level = "warn" if event["to"] < event["from"] else "plain"
            self._log(event, level)

    def _on_nonfinite(self, event: Event) -> None:
        cause = "loss" if event["tensor"] == "loss" else line(event["module"])
        if cause in self.causes or len(self.causes) < _MAX_LINES:
            self.causes[cause] += 1

    def _on_incident(self, event: Event) -> None:
        self.counts["incident", event["verdict"]] += 1
        if "rolled_back_to" in event:
            self._log(event, "warn", f"rolled back to {Path(event['rolled_back_to']).name}")

    def _on_eval(self, event: Event) -> None:
        self.validation.add(event["step"], followed(event)[1])
        self.validated = event
        self._log(event, "good")

    def _on_checkpoint(self, event: Event) -> None:
        self.checkpoint = event

    def _on_note(self, event: Event) -> None:
        self._log(event, "warn", event["text"])

    def _on_warning(self, event: Event) -> None:
        self.counts["warning", event["signal"]] += 1

    def _on_telemetry(self, event: Event) -> None:
        self.counts["telemetry", ""] += 1

    def _on_precision(self, event: Event) -> None:
        self.flop_share = {line(dtype): share for dtype, share in (event["flop_share"] or {}).items()}

    def _on_run_end(self, event: Event) -> None:
        self.end = event
        self._log(event, "good" if event["exit_code"] == 0 else "bad")
