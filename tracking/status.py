"""Checked status of a run: where its events have no end, its process is looked up.

`events.jsonl` alone cannot say that a run was killed: nobody was left to write it. The lock of the run folder names the
process of rank 0; where that process is gone the run has crashed. Cheap enough to be asked for hundreds of runs: the
events are read from their end, until the newest step.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from config.printable import line
from tracking.events import Event
from tracking.jsonl import beginnings, event_on, lines_backwards
from tracking.numbers import duration
from tracking.run_lock import LOCK, SILENT_SECONDS, holder

State = Literal["running", "silent", "killed", "done", "preempted", "aborted", "crashed"]
"""Running, and lately without an event; gone without a recorded end; else the `status` of its `run_end`."""

SILENT_STEPS = 10
"""A running run is reported as silent after this many of its steps, and SILENT_SECONDS, without an event."""

_TELEMETRY = beginnings("telemetry")


@dataclass(frozen=True)
class Status:
    """Whether a run runs, and how it ended. What to think of that is in `tracking.verdict`."""

    state: State
    cause: str = ""
    """Printable, one line: why it ended early, or for how long it has been silent; otherwise empty."""
    step: int = 0
    """Steps attempted, by the newest event; 0 before the first."""
    since: float | None = None
    """[seconds since the epoch] Running: when its process took the run folder. Else: its `run_end`, or where nobody
    wrote one, the newest event. None: not known."""
    end: Event | None = None
    """The `run_end` that was recorded."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs, and where nobody recorded it."""
        return self.end.get("exit_code") if self.end else None

    @property
    def over(self) -> bool:
        """Whether it has ended, however."""
        return self.state not in ("running", "silent")


def run_status(run_dir: Path, now: float | None = None) -> Status:
    """Status of the run in a folder. now: seconds since the epoch; None is the present. Raises nothing."""
    now = time.time() if now is None else now
    end, newest = newest_session(run_dir / "events.jsonl")
    writer = holder(run_dir)
    step = int(newest["step"]) if newest else 0
    if writer is not None and writer.alive and (end is None or (writer.since or 0.0) > end["time"]):
        silence = _silence(newest, writer.since, now)
        return Status("silent" if silence else "running", silence, step, writer.since)
    if end is not None:
        return ended(end, step)
    age = "" if newest is None else duration(max(0.0, now - newest["time"]))
    seen = f"the newest event is {age} old" if newest is not None else "nothing was recorded"
    if writer is not None:
        cause = f"its process ({writer.words}) is gone and recorded no end; {seen}"
    elif not (run_dir / LOCK).exists() and newest is not None and not _silence(newest, None, now):
        return Status("running", step=step)  # in a folder that could not be locked
    else:
        cause = f"no process has the run folder, and no end was recorded; {seen}"
    return Status("killed", line(cause), step, newest["time"] if newest else None)


def ended(end: Event, step: int) -> Status:
    """Status of a run whose `run_end` is `end`, after `step` attempts."""
    return Status(end["status"], line(end.get("reason") or ""), step, end["time"], end)


_STEPS_AFTER_AN_END = 2
"""A rank cannot make more steps without the one that has ended: each is a collective."""


def newest_session(events: Path) -> tuple[Event | None, Event | None]:
    """The `run_end` of the newest session, and the newest event that has the run's step; None where there is none.

    Read backwards, until the end, the start or a few steps: of notes and checkpoints that follow there are few. An end
    that another rank wrote may come before the last step of rank 0, which was about to record it.
    """
    newest: Event | None = None
    last: Event | None = None
    steps = 0
    try:
        with events.open("rb") as file:
            for text in lines_backwards(file):
                event = None if text.startswith(_TELEMETRY) else event_on(text)
                if event is None:
                    continue
                kind = event["event"]
                if kind == "run_end":
                    return event, last or newest or event
                if kind in ("step", "run_start"):
                    # what came after it tells when the run was last seen; a checkpoint may be of an earlier step
                    last = last or {**event, "time": newest["time"] if newest else event["time"]}
                    steps += 1
                    if kind == "run_start" or steps > _STEPS_AFTER_AN_END:
                        break
                newest = newest or event
    except OSError:
        return None, None
    return None, last or newest


def _silence(newest: Event | None, since: float | None, now: float) -> str:
    """Text about a running run that has recorded nothing for long; empty while its silence is usual."""
    if newest is None or (since is not None and newest["time"] < since):
        return ""  # preparing its data, building the model
    usual = max(SILENT_SECONDS, SILENT_STEPS * (newest.get("step_seconds") or 0.0))
    return f"no event for {duration(now - newest['time'])}" if now - newest["time"] > usual else ""
