"""The measures that need no baseline: the numerics of a run, and whether it ended as it should."""

from __future__ import annotations

from tracking.report.context import WIDE, Finding, MeasureContext, measured, not_measured

GOOD_ENDINGS = frozenset({"done", "preempted"})
"""Statuses of a run that ended as it should: all steps done, or stopped on request with its state saved."""


def nonfinite(context: MeasureContext) -> Finding:
    """Steps that were not finite, without overflows that the loss scale handled."""
    history = context.run.history
    how = (
        "attempted steps whose loss or gradient norm was not finite, over all sessions, except overflows: steps with "
        "a finite loss that the dynamic loss scale handled"
    )
    if not history.attempts:
        return not_measured(context, "nonfinite", "no step was recorded", how)
    why = f"the first: {history.first_nonfinite}" if history.first_nonfinite else ""
    return measured(context, "nonfinite", history.nonfinite, f"{history.nonfinite:,}", how, why)


def restore_success(context: MeasureContext) -> Finding:
    """Share of restores that came back from the newest checkpoint."""
    how = (
        "rollbacks, and sessions that had a checkpoint to resume from; one succeeds that resumes from the newest "
        "without skipping a damaged one or another run's. A start that fails before its first event is not seen"
    )
    restored, due = context.run.history.restores
    if not due:
        return not_measured(context, "restore_success", "nothing had to be restored", how)
    return measured(context, "restore_success", restored / due, f"{restored / due:.1%} ({restored} of {due})", how)


def overflow_rate(context: MeasureContext) -> Finding:
    """Share of steps that the loss scale had to skip."""
    how = "attempted steps with a finite loss whose overflow the dynamic loss scale handled, over all attempts"
    history = context.run.history
    if not history.attempts:
        return not_measured(context, "overflow_rate", "no step was recorded", how)
    if not history.scaled:
        return not_measured(context, "overflow_rate", "the loss is not scaled", how)
    rate = history.overflows / history.attempts
    return measured(context, "overflow_rate", rate, f"{rate:.2%} ({history.overflows:,} of {history.attempts:,})", how)


def job_success(context: MeasureContext) -> Finding:
    """Whether the run ended as it should."""
    how = "how the newest session ended; without a run_end event, whether its process is still there"
    history = context.run.history
    lost = sum(session.crashed for session in history.sessions[:-1])
    earlier = f"; {lost} of {len(history.sessions) - 1} earlier sessions crashed" if lost else ""
    if history.end is not None:
        good = history.end["status"] in GOOD_ENDINGS
        shown = f"{history.end['status']} (exit code {history.end['exit_code']}){earlier}"
        return measured(context, "job_success", float(good), shown, how, history.end.get("reason", ""))
    status = context.run.status(context.now)
    if not status.over:
        silent = f", {status.cause}" if status.cause else ""
        return not_measured(context, "job_success", f"it has not ended: it is running{silent}", how)
    return measured(context, "job_success", 0.0, f"crashed{earlier}", how, status.cause)


def low_precision(context: MeasureContext) -> Finding:
    """Share of matmul FLOPs that were computed below FP32: the rest is fallback."""
    how = (
        "share of the forward pass's matmul FLOPs that were computed below FP32, from the newest precision event. "
        "The rest fell back to FP32, or is configured to stay there"
    )
    if context.run.low_precision is None:
        return not_measured(context, "low_precision", "the run is configured to compute in FP32", how)
    seen = [event["flop_share"] for event in context.run.facts.rare_events.get("precision", []) if event["flop_share"]]
    if not seen:
        return not_measured(context, "low_precision", "no precision event was recorded", how)
    share = 1.0 - sum(part for dtype, part in seen[-1].items() if dtype in WIDE)
    parts = ", ".join(f"{dtype} {part:.1%}" for dtype, part in seen[-1].items())
    return measured(context, "low_precision", share, f"{share:.1%} ({parts})", how)


def drift(context: MeasureContext) -> Finding:
    """Distance of 16-bit parameters from their FP32 masters."""
    how = (
        "largest relative distance of a 16-bit parameter from its master rounded to 16 bits, over all telemetry events"
    )
    history = context.run.history
    if history.drift is not None:
        shown = f"{history.drift:.3g} ({history.telemetry:,} samples)"
        return measured(context, "drift", history.drift, shown, how, "16-bit parameters are not their rounded masters")
    if context.run.facts.start.get("compute") in WIDE:
        return not_measured(context, "drift", "the parameters are the FP32 masters themselves", how)
    return not_measured(context, "drift", "no telemetry event has it; set telemetry.every_steps", how)
