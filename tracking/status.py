"""Status of a run: if its events record no end, its process is looked up.

`events.jsonl` alone cannot say that a run was killed, since no process was left to record it. The run folder's lock
names the process of rank 0; if that is gone, the run was killed. This is cheap enough for hundreds of runs: events are
read from the end, back to the newest step.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from config import yaml_text
from config.printable import line
from tracking.events import Event
from tracking.jsonl import beginnings, event_on, lines_backwards
from tracking.numbers import duration
from tracking.run_dir import RunDir, setting
from tracking.run_lock import LOCK, SILENT_SECONDS, holder

State = Literal["running", "silent", "killed", "done", "preempted", "aborted", "crashed"]
"""running; silent: running without recent events; killed: gone without a recorded end; else `status` of `run_end`."""

SILENT_STEPS = 10
"""A running run is silent if it records no event for the time of this many steps, and for SILENT_SECONDS."""
FIRST_SECONDS = 1800.0
"""The same before a session's first step, which may compile kernels, and while a run may evaluate or save."""

_TELEMETRY = beginnings("telemetry")


@dataclass(frozen=True)
class Status:
    """Whether a run is alive, and how it ended. `tracking.verdict` judges it."""

    state: State
    cause: str = ""
    """Why it ended early or for how long it has been silent, as one printable line; otherwise empty."""
    step: int = 0
    """Step number of the newest event; 0 before the first."""
    since: float | None = None
    """[seconds since the epoch] When a running run locked its folder; otherwise the time of its `run_end`, or of the
    newest event if there is none. None if unknown."""
    end: Event | None = None
    """The recorded `run_end`, if any."""

    @property
    def exit_code(self) -> int | None:
        """Recorded exit code; None while the run is running, or if none was recorded."""
        return self.end.get("exit_code") if self.end else None

    @property
    def over(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.state not in ("running", "silent")


def run_status(run_dir: Path, now: float | None = None) -> Status:
    """Status of the run in a folder. now: seconds since the epoch; None is the present. Never raises."""
    now = time.time() if now is None else now
    end, newest = newest_session(run_dir / "events.jsonl")
    writer = holder(run_dir)
    step = int(newest["step"]) if newest else 0
    if writer is not None and writer.alive and (end is None or (writer.since or 0.0) > end["time"]):
        silence = _silence(run_dir, newest, writer.since, now)
        return Status("silent" if silence else "running", silence, step, writer.since)
    if end is not None:
        return ended(end, step)
    age = "" if newest is None else duration(max(0.0, now - newest["time"]))
    seen = f"the newest event is {age} old" if newest is not None else "nothing was recorded"
    if writer is not None:
        cause = f"its process ({writer.words}) is gone and recorded no end; {seen}"
    elif not (run_dir / LOCK).exists() and newest is not None and not _silence(run_dir, newest, None, now):
        return Status("running", step=step)  # its folder could not be locked
    else:
        cause = f"no process has the run folder, and no end was recorded; {seen}"
    return Status("killed", line(cause), step, newest["time"] if newest else None)


def ended(end: Event, step: int) -> Status:
    """Status of a run that recorded `end` as its `run_end`, after `step` attempted steps."""
    return Status(end["status"], line(end.get("reason") or ""), step, end["time"], end)


_STEPS_AFTER_AN_END = 2
"""A surviving rank cannot complete more steps than this, since each step is a collective."""


def newest_session(events: Path) -> tuple[Event | None, Event | None]:
    """(`run_end` of the newest session, newest event with the run's step); None where missing.

    Reads backwards to the end, the start or a few steps, after which only few notes and checkpoints follow. A `run_end`
    written by another rank may precede the last step of rank 0, which was about to record it.
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
                    # later events tell when the run was last seen, but a checkpoint may belong to an earlier step
                    seen = newest or event
                    last = last or {**event, "time": seen["time"], "saving": seen.get("saving")}
                    steps += 1
                    if kind == "run_start" or steps > _STEPS_AFTER_AN_END:
                        break
                newest = newest or event
    except OSError:
        return None, None
    return None, last or newest


def _silence(run_dir: Path, newest: Event | None, since: float | None, now: float) -> str:
    """How long a running run has recorded nothing, as text; empty while that is normal."""
    if newest is None or (since is not None and newest["time"] < since):
        return ""  # still preparing data or building the model
    seconds = newest.get("step_seconds")
    usual = FIRST_SECONDS if seconds is None else max(SILENT_SECONDS, SILENT_STEPS * seconds)
    silent = now - newest["time"]
    if usual < silent <= FIRST_SECONDS and (newest.get("saving") or _waits_after(newest["step"], run_dir)):
        return ""
    return f"no event for {duration(silent)}" if silent > usual else ""


def _waits_after(step: int, run_dir: Path) -> bool:
    """Whether the run's config has training evaluate or save after this step, which it may wait for."""
    try:
        config = yaml_text.parse(RunDir(run_dir).config.read_text(encoding="utf-8"))
        for section in ("evaluate", "checkpoint"):
            every, further = (setting(config, f"{section}.{key}") for key in ("every_steps", "also_after"))
            if (every and step % every == 0) or step in (further or ()):
                return True
        return bool(step == setting(config, "run.steps"))
    except (OSError, ValueError, TypeError):  # none yet, or damaged
        return False
