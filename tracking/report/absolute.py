"""The measures that need no baseline: the numerics of a run, and whether it ended as it should."""

from __future__ import annotations

from tracking.report.context import WIDE, MeasureContext, Measured, NotMeasured

GOOD_ENDINGS = frozenset({"done", "preempted"})
"""Statuses of a run that ended as it should: all steps done, or stopped on request with its state saved."""


def nonfinite(context: MeasureContext) -> Measured:
    """Steps that were not finite, without overflows that the loss scale handled."""
    history = context.run.history
    how = (
        "attempted steps whose loss or gradient norm was not finite, over all sessions, except overflows: steps with "
        "a finite loss that the dynamic loss scale handled"
    )
    if not history.attempts:
        raise NotMeasured("no step was recorded", how)
    why = f"the first: {history.first_nonfinite}" if history.first_nonfinite else ""
    return Measured(history.nonfinite, f"{history.nonfinite:,}", how, why)


def restore_success(context: MeasureContext) -> Measured:
    """Share of restores that came back from the newest checkpoint."""
    how = (
        "rollbacks, and sessions that had a checkpoint to resume from; one succeeds that resumes from the newest "
        "without skipping a damaged one or another run's. A start that fails before its first event is not seen"
    )
    restored, due = context.run.history.restores
    if not due:
        raise NotMeasured("nothing had to be restored", how)
    return Measured(restored / due, f"{restored / due:.1%} ({restored} of {due})", how)


def overflow_rate(context: MeasureContext) -> Measured:
    """Share of steps that the loss scale had to skip."""
    how = "attempted steps with a finite loss whose overflow the dynamic loss scale handled, over all attempts"
    history = context.run.history
    if not history.attempts:
        raise NotMeasured("no step was recorded", how)
    if not history.scaled:
        raise NotMeasured("the loss is not scaled", how)
    rate = history.overflows / history.attempts
    return Measured(rate, f"{rate:.2%} ({history.overflows:,} of {history.attempts:,})", how)


def job_success(context: MeasureContext) -> Measured:
    """Whether the run ended as it should."""
    how = "how the newest session ended; without a run_end event, whether its process is still there"
    history = context.run.history
    lost = sum(session.crashed for session in history.sessions[:-1])
    earlier = f"; {lost} of {len(history.sessions) - 1} earlier sessions crashed" if lost else ""
    if history.end is not None:
        good = history.end["status"] in GOOD_ENDINGS
        shown = f"{history.end['status']} (exit code {history.end['exit_code']}){earlier}"
        return Measured(float(good), shown, how, history.end.get("reason", ""))
    status = context.run.status(context.now)
    if not status.over:
        silent = f", {status.cause}" if status.cause else ""
        raise NotMeasured(f"it has not ended: it is running{silent}", how)
    return Measured(0.0, f"crashed{earlier}", how, status.cause)


def low_precision(context: MeasureContext) -> Measured:
    """Share of matmul FLOPs that were computed below FP32: the rest is fallback."""
    how = (
        "share of the forward pass's matmul FLOPs that were computed below FP32, from the newest precision event. "
        "The rest fell back to FP32, or is configured to stay there"
    )
    if context.run.low_precision is None:
        raise NotMeasured("the run is configured to compute in FP32", how)
    seen = [event["flop_share"] for event in context.run.facts.rare_events.get("precision", []) if event["flop_share"]]
    if not seen:
        raise NotMeasured("no precision event was recorded", how)
    share = 1.0 - sum(part for dtype, part in seen[-1].items() if dtype in WIDE)
    parts = ", ".join(f"{dtype} {part:.1%}" for dtype, part in seen[-1].items())
    return Measured(share, f"{share:.1%} ({parts})", how)


def drift(context: MeasureContext) -> Measured:
    """Distance of 16-bit parameters from their FP32 masters."""
    how = (
        "largest relative distance of a 16-bit parameter from its master rounded to 16 bits, over all telemetry events"
    )
    history = context.run.history
    if history.drift is not None:
        shown = f"{history.drift:.3g} ({history.telemetry:,} samples)"
        return Measured(history.drift, shown, how, "16-bit parameters are not their rounded masters")
    if context.run.facts.start.get("compute") in WIDE:
        raise NotMeasured("the parameters are the FP32 masters themselves", how)
    raise NotMeasured("no telemetry event has it; set telemetry.every_steps", how)
