"""The training loop: one step after another, and now and then an evaluation and a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from precision.guard import Verdict
from training.attempt import attempt
from training.parts import Parts
from training.progress import Progress
from training.record_step import record_checkpoint, record_evaluation

DONE, DIVERGED, PREEMPTED = 0, 3, 75
"""Exit codes: all steps done; stopped on numerics with a usable checkpoint; stopped on request, saved."""


@dataclass(frozen=True)
class Ending:
    """Where a run ended, and how."""

    progress: Progress
    exit_code: int
    reason: str = ""
    """Why it stopped early, in words."""


def train(parts: Parts, progress: Progress) -> Ending:
    """Train from `progress` until the planned steps are done, the guard says stop, or someone asks to stop.

    A checkpoint of where it ended is on disk, unless no step was made.
    """
    config = parts.resolved.config
    planned, saved_at = config.run.steps, progress.step
    while progress.step < planned:
        progress, judgement, preempted = attempt(parts, progress)
        if judgement.verdict is Verdict.ABORT:
            save(parts, progress)
            return Ending(progress, DIVERGED, judgement.reason)
        if judgement.verdict is Verdict.ROLLBACK:
            save(parts, progress)  # a crash must not give the used budget and the skipped batches back
            saved_at = progress.step
            continue
        if preempted:
            save(parts, progress)
            return Ending(progress, PREEMPTED, "asked to stop by SIGTERM or SIGUSR1")
        if _due(config.evaluate.every_steps, progress.step, planned):
            record_evaluation(parts.record, progress, parts.engine.evaluate(parts.validation()))
        if _due(config.checkpoint.every_steps, progress.step, planned):
            save(parts, progress)
            saved_at = progress.step
    if progress.step != saved_at:
        save(parts, progress)
    return Ending(progress, DONE)


def save(parts: Parts, progress: Progress) -> None:
    """Save a checkpoint and record it."""
    state = {"guard": parts.guard.state_dict(), "promotions": parts.promotions.state_dict(parts.engine.regions)}
    record_checkpoint(parts.record, progress, parts.checkpoints.save(parts.engine, progress, state))


def _due(every: int, step: int, planned: int) -> bool:
    return every > 0 and (step % every == 0 or step == planned)
