"""A run's sessions, non-finite steps and drift, read from its events in one pass with bounded memory.

Lines of ordinary steps are not parsed, so that hundreds of runs, and runs of a million steps, are read in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from tracking.crash import CRASHED
from tracking.events import Event, describe_event
from tracking.jsonl import Follower, beginnings, event_on

SKIPPED_CHECKPOINT = "passed over checkpoint"
"""Prefix of the note that names a checkpoint which a resuming session did not take, and why."""

_HANDLED = ("overflow", "hysteresis")  # reasons of scale events that follow an overflow
_STEP, _TELEMETRY = beginnings("step", "telemetry")
_NOT_FINITE = (b'"nan"', b'inf"')


@dataclass
class Session:
    """One start of the run. Times in seconds since the epoch."""

    began: float
    resumed_from: str | None
    could_resume: bool
    """Whether an earlier session had recorded a checkpoint."""
    last: float
    """Time of its newest event."""
    skipped_checkpoints: int = 0
    """Checkpoints that it did not take because they were damaged or of another run."""
    rollbacks: int = 0
    end: Event | None = None
    aborted: str | None = None
    """Reason of its first ABORT incident."""

    @property
    def crashed(self) -> bool:
        """Whether it ended without a `run_end`, or with one written by another rank. Meaningless while it runs."""
        return self.end is None or self.end["status"] == CRASHED

    @property
    def should_restore(self) -> bool:
        """Whether it had a checkpoint to resume from."""
        return self.could_resume or self.resumed_from is not None or self.skipped_checkpoints > 0

    @property
    def restored(self) -> bool:
        """Whether it resumed from the newest checkpoint that it found."""
        return self.resumed_from is not None and self.skipped_checkpoints == 0


@dataclass
class RunHistory:
    """A run's sessions and failures, over all attempts at steps, including abandoned ones."""

    sessions: list[Session] = field(default_factory=list)
    attempts: int = 0
    """Steps attempted."""
    overflows: int = 0
    """Attempts with a finite loss and a non-finite gradient that the dynamic loss scale handled."""
    nonfinite: int = 0
    """All other attempts whose loss or gradient norm was not finite."""
    forward_overflows: int = 0
    """Attempts among `nonfinite` in which an activation exceeded FP16's largest number: no loss scale handles that."""
    first_nonfinite: str = ""
    scaled: bool = False
    """Whether the loss was scaled: the scale changed, or was not 1."""
    telemetry: int = 0
    """Telemetry events that have a drift."""
    drift: float | None = None
    """Largest relative distance of a 16-bit parameter from its rounded master."""

    @property
    def end(self) -> Event | None:
        """The newest session's `run_end`; None while it runs, or when it crashed."""
        return self.sessions[-1].end if self.sessions else None

    @property
    def restores(self) -> tuple[int, int]:
        """(restored, should have been): sessions with a checkpoint to resume from, and rollbacks."""
        rollbacks = sum(session.rollbacks for session in self.sessions)
        due = [session for session in self.sessions if session.should_restore]
        return rollbacks + sum(session.restored for session in due), rollbacks + len(due)


@dataclass
class _Attempt:
    """An attempt at a step that was not finite, until its other events are read."""

    step: int
    loss_finite: bool = True
    handled: bool = False
    overflowed: bool = False
    cause: str = ""


class _Reader:
    def __init__(self) -> None:
        self.history = RunHistory()
        self._saved = False
        self._attempt: _Attempt | None = None
        self._first_step = True
        self._newest = b""

    def take(self, line: bytes) -> bool:
        """Take the event on a line; whether there is one."""
        step = line.startswith(_STEP)
        if step and not self._first_step and not any(word in line for word in _NOT_FINITE):
            self._begin_attempt()
        elif step or not line.startswith(_TELEMETRY) or b'"drift":null' not in line:
            event = event_on(line)
            if event is None:
                return False
            handler = getattr(self, f"_on_{event['event']}", None)
            try:
                if handler is not None:
                    handler(event)
            except (KeyError, TypeError, AttributeError, ValueError):
                return False
        self._newest = line
        return True

    def _begin_attempt(self) -> None:
        self.finish_attempt()
        self.history.attempts += 1

    def end_session(self) -> None:
        """Date the session by the newest line: the one before the next session, or the last of the file."""
        event = event_on(self._newest)
        if event is not None and self.history.sessions:
            self.history.sessions[-1].last = event["time"]

    def finish_attempt(self) -> None:
        """Count the attempt, once all its events are read."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        if attempt.handled and attempt.loss_finite:
            self.history.overflows += 1
            return
        self.history.nonfinite += 1
        self.history.forward_overflows += attempt.overflowed
        if not self.history.first_nonfinite:
            self.history.first_nonfinite = f"step {attempt.step}{attempt.cause}"

    def _on_run_start(self, event: Event) -> None:
        self.finish_attempt()
        self.end_session()
        self._first_step, time = True, event["time"]
        self.history.sessions.append(Session(time, event["resumed_from"], could_resume=self._saved, last=time))

    def _on_step(self, event: Event) -> None:
        self._begin_attempt()
        self._first_step = False
        self.history.scaled = self.history.scaled or event["loss_scale"] not in (None, 1.0)
        numbers = [event["loss"], event["grad_norm"]]
        if not all(math.isfinite(number) for number in numbers if number is not None):
            self._attempt = _Attempt(event["step"], loss_finite=numbers[0] is None or math.isfinite(numbers[0]))

    def _on_scale(self, event: Event) -> None:
        self.history.scaled = True
        if self._attempt is not None and self._attempt.step == event["step"] and event["reason"] in _HANDLED:
            self._attempt.handled = True

    def _on_nonfinite(self, event: Event) -> None:
        if self._attempt is None:
            self._attempt = _Attempt(event["step"])
        what = (event["tensor"], event["kind"], event.get("dtype"))
        self._attempt.overflowed |= what == ("activation", "inf", "float16")
        if not self._attempt.cause:
            self._attempt.cause = f": {describe_event(event)}"

    def _on_incident(self, event: Event) -> None:
        if event["verdict"] == "ABORT" and self.history.sessions and self.history.sessions[-1].aborted is None:
            self.history.sessions[-1].aborted = event["reason"]
        if event["verdict"] == "ROLLBACK" and event.get("rolled_back_to") is not None and self.history.sessions:
            self.history.sessions[-1].rollbacks += 1

    def _on_note(self, event: Event) -> None:
        if self.history.sessions and event["text"].startswith(SKIPPED_CHECKPOINT):
            self.history.sessions[-1].skipped_checkpoints += 1

    def _on_checkpoint(self, event: Event) -> None:
        self._saved = True

    def _on_run_end(self, event: Event) -> None:
        if self.history.sessions:
            self.history.sessions[-1].end = event

    def _on_telemetry(self, event: Event) -> None:
        if event["drift"] is not None:
            self.history.telemetry += 1
            largest, value = self.history.drift, event["drift"]["maximum"]
            if largest is None or (not math.isnan(largest) and not value <= largest):  # nan counts as the largest
                self.history.drift = value


def read_history(path: Path) -> RunHistory:
    """The history of one `events.jsonl`. An incomplete last line is left out.

    Raises UserError when the file cannot be read or another line that has to be read is damaged.
    """
    reader, file = _Reader(), Follower(path)
    for line in file.lines(whole=True):
        if not reader.take(line):
            file.refuse(line)
    reader.finish_attempt()
    reader.end_session()
    return reader.history
