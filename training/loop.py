"""The training loop: one step after another, and now and then an evaluation and a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from precision.guard import Verdict
from training.attempt import attempt
from training.checkpoint import SaveFailed
from training.parts import Parts
from training.progress import Progress
from training.record_step import record_checkpoint, record_evaluation

DONE, DIVERGED, UNSAVED, PREEMPTED = 0, 3, 74, 75
"""Exit codes: all steps done; stopped on numerics with a usable checkpoint; checkpoints cannot be written; stopped on
request, saved."""


@dataclass(frozen=True)
class Ending:
    """Where a run ended, and how."""

    progress: Progress
    exit_code: int
    reason: str = ""
    """Why it stopped early, in words."""


def train(parts: Parts, progress: Progress) -> Ending:
    """Train from `progress` until the planned steps are done, the guard says stop, or someone asks to stop.

    A checkpoint of where it ended is on disk, unless no step was made or the ending says that it could not be saved.
    """
    ending = _until_it_ends(parts, progress)
    failures = parts.checkpoints.failures
    note_checkpoints(parts)
    if parts.checkpoints.failures > failures and ending.exit_code in (DONE, PREEMPTED):
        return Ending(ending.progress, UNSAVED, "the last checkpoint does not read back as it was written")
    return ending


def _until_it_ends(parts: Parts, progress: Progress) -> Ending:
    config = parts.resolved.config
    planned, saved_at = config.run.steps, progress.step
    while progress.step < planned:
        progress, judgement, preempted = attempt(parts, progress)
        if judgement.verdict is Verdict.ABORT:
            problem = save(parts, progress)
            return Ending(progress, DIVERGED, judgement.reason + (f"; {problem}" if problem else ""))
        if judgement.verdict is Verdict.ROLLBACK:
            save(parts, progress)  # a crash must not give the used budget and the skipped batches back
            saved_at = progress.step
            continue
        if preempted:
            problem = save(parts, progress)
            return Ending(progress, UNSAVED if problem else PREEMPTED, problem or parts.preemption.reason)
        if _due(config.evaluate.every_steps, progress.step, planned):
            record_evaluation(parts.record, progress, parts.engine.evaluate(parts.validation()))
        if _due(config.checkpoint.every_steps, progress.step, planned):
            problem = save(parts, progress)
            if problem is None:
                saved_at = progress.step
            elif parts.checkpoints.failures >= config.checkpoint.max_failures:
                return Ending(progress, UNSAVED, f"{parts.checkpoints.failures} saves in a row failed: {problem}")
    problem = save(parts, progress) if progress.step != saved_at else None
    return Ending(progress, UNSAVED if problem else DONE, problem or "")


def save(parts: Parts, progress: Progress) -> str | None:
    """Save a checkpoint and record it, or record why that failed and return it: training can go on without."""
    note_checkpoints(parts)
    state = {"guard": parts.guard.state_dict(), "promotions": parts.promotions.state_dict(parts.engine.regions)}
    try:
        saved = parts.checkpoints.save(parts.engine, progress, state)
    except SaveFailed as failure:
        parts.record.note(str(failure))
        return str(failure)
    record_checkpoint(parts.record, progress, saved)
    return None


def note_checkpoints(parts: Parts) -> None:
    """Record which checkpoints were passed over, and what came of reading the last one back."""
    for line in parts.checkpoints.settle():
        parts.record.note(line)


def _due(every: int, step: int, planned: int) -> bool:
    return every > 0 and (step % every == 0 or step == planned)
