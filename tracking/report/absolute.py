"""The measures of a report that a run answers for alone: its numerics, and whether it ended as it should."""

from __future__ import annotations

from tracking.console import duration
from tracking.report.context import Question, found, missing
from tracking.report.finding import WIDE, Finding

SILENT_SECONDS = 3600.0
"""A run without an end whose newest event is older than this has crashed; a younger one may still be running."""

GOOD_ENDINGS = frozenset({"done", "preempted"})
"""Statuses of a run that ended as it should: all steps done, or stopped on request with its state saved."""


def nonfinite(asked: Question) -> Finding:
    """Steps that were not finite and that no loss scale answered."""
    story = asked.run.story
    how = (
        "attempted steps whose loss or gradient norm was not finite, over all sessions, those aside that a dynamic "
        "loss scale answered with their loss finite: they are overflows"
    )
    if not story.attempts:
        return missing(asked, "nonfinite", "no step was recorded", how)
    why = f"the first: {story.first_nonfinite}" if story.first_nonfinite else ""
    return found(asked, "nonfinite", story.nonfinite, f"{story.nonfinite:,}", how, why)


def restore_success(asked: Question) -> Finding:
    """Share of restores that came back from the newest checkpoint."""
    how = (
        "rollbacks, and sessions that had a checkpoint to go on from; one succeeds that goes on from the newest, "
        "and passes none over as damaged or another run's. A start that fails before its first event is not seen"
    )
    restored, due = asked.run.story.restores
    if not due:
        return missing(asked, "restore_success", "nothing had to be restored", how)
    return found(asked, "restore_success", restored / due, f"{restored / due:.1%} ({restored} of {due})", how)


def overflow_rate(asked: Question) -> Finding:
    """Share of steps that the loss scale had to skip."""
    how = "attempted steps that overflowed with a finite loss and that a dynamic loss scale answered, over all attempts"
    story = asked.run.story
    if not story.attempts:
        return missing(asked, "overflow_rate", "no step was recorded", how)
    if not story.scaled:
        return missing(asked, "overflow_rate", "the loss is not scaled", how)
    rate = story.overflows / story.attempts
    return found(asked, "overflow_rate", rate, f"{rate:.2%} ({story.overflows:,} of {story.attempts:,})", how)


def job_success(asked: Question) -> Finding:
    """Whether the run ended as it should."""
    how = "how the newest session ended; no run_end event, and nothing recorded for an hour, is a crash"
    story = asked.run.story
    lost = sum(session.end is None for session in story.sessions[:-1])
    before = f"; {lost} of {len(story.sessions) - 1} earlier sessions ended without a word" if lost else ""
    if story.end is not None:
        good = story.end["status"] in GOOD_ENDINGS
        shown = f"{story.end['status']} (exit code {story.end['exit_code']}){before}"
        return found(asked, "job_success", float(good), shown, how, story.end.get("reason", ""))
    silence = asked.now - story.sessions[-1].last
    if silence < SILENT_SECONDS:
        reason = f"it has not ended: its newest event is {duration(max(0.0, silence))} old"
        return missing(asked, "job_success", reason, how)
    why = f"no run_end event; the newest event is {duration(silence)} old"
    return found(asked, "job_success", 0.0, f"crashed{before}", how, why)


def low_precision(asked: Question) -> Finding:
    """Share of matmul FLOPs that really computed below FP32: the rest is fallback."""
    how = (
        "share of the forward pass's matmul FLOPs that computed below FP32, as seen on the steps of the precision "
        "events; the newest. The rest fell back to FP32, or was meant to stay there"
    )
    if asked.run.low_precision is None:
        return missing(asked, "low_precision", "the run is meant to compute in FP32", how)
    seen = [event["flop_share"] for event in asked.run.facts.marks.get("precision", []) if event["flop_share"]]
    if not seen:
        return missing(asked, "low_precision", "no precision event was recorded", how)
    share = 1.0 - sum(part for dtype, part in seen[-1].items() if dtype in WIDE)
    parts = ", ".join(f"{dtype} {part:.1%}" for dtype, part in seen[-1].items())
    return found(asked, "low_precision", share, f"{share:.1%} ({parts})", how)


def drift(asked: Question) -> Finding:
    """How far 16-bit parameters are from their masters."""
    how = (
        "largest relative distance of a 16-bit parameter from its master rounded to 16 bits, over all telemetry events"
    )
    story = asked.run.story
    if story.drift is not None:
        shown = f"{story.drift:.3g} ({story.telemetry:,} looks)"
        return found(asked, "drift", story.drift, shown, how, "16-bit parameters are not their rounded masters")
    if asked.run.facts.start.get("compute") in WIDE:
        return missing(asked, "drift", "the parameters are the FP32 masters themselves", how)
    return missing(asked, "drift", "no telemetry event has it; set telemetry.every_steps", how)
