"""Try a recorded step, and some after it, under another precision: would the run have survived?

It survives if the guard has no incident in the window and the last step is applied. If the recorded step was itself an
overflow that the loss scale handles, which ends no run, it must be applied this time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from config.cli import DIVERGED, DONE
from config.command_line import read_command_line
from config.errors import UserError
from config.printable import line
from config.resolved import Resolved
from precision.guard import Judgement, Verdict
from tools.replay.recorded import Event, Recorded
from tools.replay.repeat import Log, describe, restored
from tracking.run_dir import RunDir

_FURTHER = ("model.attention",)
"""Keys outside `precision:` that change rounding, but neither model nor data."""
_SETS_SCALE = ("precision.loss_scale", "precision.loss_scale.initial")
"""Overrides that make the loss scale start at `initial` instead of at the checkpoint's value."""


@dataclass(frozen=True)
class Tried:
    """A step under the other precision."""

    event: Event
    """The `step` event."""
    judgement: Judgement
    causes: Sequence[Event] = ()
    """The `nonfinite` events."""
    faults: Sequence[Event] = ()
    """The `fault` events: faults injected by the config's `faults:`."""
    recorded: Event | None = None
    """The run's own `step` event for the same step and batch; None if it has none."""

    @property
    def incident(self) -> bool:
        """Whether the guard refused it, other than for an overflow that the loss scale handles."""
        return self.judgement.verdict is not Verdict.STEP and not self.judgement.routine

    @property
    def finite(self) -> bool:
        """Whether loss and gradient norm are finite."""
        return math.isfinite(self.event["loss"]) and math.isfinite(self.event["grad_norm"])

    @property
    def problem(self) -> str:
        """The human-readable reason why the step failed."""
        still = "still " if self.recorded is not None and not self.recorded["applied"] else ""
        text = f"is {still}not finite" if not self.finite else f"is {still}refused: {self.judgement.reason}"
        text += f" ({numbers(self.event)})"
        if self.causes:
            text += f": {describe(self.causes[0])}"
        if self.faults:
            planted = ", ".join(fault["kind"] for fault in self.faults)
            text += f"; faults: of the config plants {planted} there, which no precision undoes"
        return text


def under(resolved: Resolved, overrides: Sequence[str], environment: Mapping[str, str]) -> Resolved:
    """The run under the overrides. Raises UserError for one that makes it a different run, or changes nothing."""
    for text in overrides:
        key, equals, _ = text.partition("=")
        if equals and not key.startswith("precision.") and key not in _FURTHER:
            raise UserError(
                f"--what-if {text}: {key} would change the run, and not its precision alone; only keys of precision: "
                f"and {', '.join(_FURTHER)} may change"
            )
    other = read_command_line(["--config", str(resolved.config_path), *overrides], environment, started=True)
    if other.config == resolved.config:
        raise UserError(f"--what-if {' '.join(overrides)}: is what the run had already; give another value")
    return other


def what_if(
    run_dir: RunDir, other: Resolved, recorded: Recorded, overrides: Sequence[str], log: Log, *, after: int
) -> int:
    """Run the steps up to the recorded one, and up to `after` planned ones after it, under `other`; DONE if the run
    survives, else DIVERGED. A collective over the run's processes."""
    keys = {text.partition("=")[0] for text in overrides}
    new_scale = not keys.isdisjoint(_SETS_SCALE)
    tried: list[Tried] = []
    with restored(run_dir, other, recorded, log, new_scale=new_scale) as run:
        if run.parts.engine.scaler_state() is None and any(key.startswith(_SETS_SCALE[0]) for key in keys):
            raise UserError(f"--what-if: {_SETS_SCALE[0]} has no effect, since nothing computes in FP16; leave it out")
        last = min(recorded.step + after, max(other.config.run.steps, recorded.step))
        known = [*run.steps, *recorded.after]
        for number in range(run.progress.step + 1, last + 1):
            expected = next((event for event in known if event["step"] == number), None)
            event, judgement = run.attempt(expected)
            causes, faults = (run.collector.of_kind(kind, number) for kind in ("nonfinite", "fault"))
            tried.append(Tried(event, judgement, causes, faults, expected))
            log(compared(tried[-1]))
            for cause in tried[-1].causes:
                log(f"  cause: {describe(cause)}")
            if judgement.verdict is Verdict.ABORT:
                break
    survived, text = verdict(tried, recorded)
    log(line(f"under {' '.join(overrides)} {text}"))
    return DONE if survived else DIVERGED


def verdict(tried: Sequence[Tried], recorded: Recorded) -> tuple[bool, str]:
    """Whether the run would have survived, and a sentence saying so. tried: from before the recorded step on."""
    target, before = recorded.step, recorded.steps[-1]
    bad = next((step for step in tried if step.incident), None)
    at = next((step for step in tried if step.event["step"] == target), None)
    if bad is None and at is not None and not at.event["applied"] and recorded.incident is None:
        bad = at
    if bad is None and not tried[-1].event["applied"]:
        bad = tried[-1]
    if bad is not None:
        number = bad.event["step"]
        text = f"the run would not have survived: step {number} {bad.problem}"
        if bad.judgement.verdict is Verdict.ABORT:
            text += "; the guard has no reaction left there but to go back to a checkpoint"
        return False, text + _following(tried, number)
    assert at is not None, "without an incident every step was tried"
    outcome = "is applied" if at.event["applied"] else "overflows, which the loss scale handles"
    refused = recorded.incident["verdict"] if recorded.incident is not None else _applied(before)
    text = f"the run would have survived: step {target} {outcome} ({numbers(at.event)}); recorded: {refused} "
    return True, text + f"({numbers(before)}){_following(tried, target)}"


def _following(tried: Sequence[Tried], number: int) -> str:
    """Human-readable number of applied steps after step `number`; empty if none was tried."""
    after = [step.event["applied"] for step in tried if step.event["step"] > number]
    return f"; applied after it: {sum(after)} of {len(after)} steps" if after else ""


def compared(step: Tried) -> str:
    """One line that compares a step with the record."""
    text = f"step {step.event['step']}: {numbers(step.event)}, {_applied(step.event)}"
    if step.judgement.routine:
        text += " for an overflow that the loss scale handles"
    elif step.incident:
        text += f" ({step.judgement.verdict.value})"
    then = step.recorded
    text += "; not recorded" if then is None else f"; recorded: {numbers(then)}, {_applied(then)}"
    return text


def numbers(event: Event) -> str:
    """Loss, gradient norm and, where there is one, loss scale of a `step` event."""
    scale = f" at loss scale {event['loss_scale']:g}" if event["loss_scale"] != 1 else ""
    return f"loss {event['loss']:.6g}, grad norm {event['grad_norm']:.6g}{scale}"


def _applied(event: Event) -> str:
    return "applied" if event["applied"] else "skipped"
