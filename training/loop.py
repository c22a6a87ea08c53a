"""The training loop: one step after another, each one explained.

attempt a step -> record what happened -> judge whether to go on -> now and then evaluate and save
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from config.command_line import Resolved
from data.loader import Batch, Batches
from precision.guard import Judgement, Verdict, judge
from tracking.record import Record
from training.checkpoint import Checkpoints
from training.engine import Engine, Health, Update
from training.ledger import read_ledger
from training.preemption import Preemption
from training.progress import Progress
from training.record_step import record_checkpoint, record_evaluation, record_step
from training.schedule import learning_rate

DONE, DIVERGED, PREEMPTED = 0, 3, 75
"""Exit codes: all steps done; stopped on numerics with a usable checkpoint; stopped on request, saved."""


@dataclass(frozen=True)
class Ending:
    """Where a run ended, and how."""

    progress: Progress
    exit_code: int
    reason: str = ""
    """Why it stopped early, in words."""


@dataclass(frozen=True)
class Parts:
    """The named collaborators of a run, built once."""

    resolved: Resolved
    engine: Engine
    batches: Batches
    validation: Callable[[], Iterable[Batch]]
    checkpoints: Checkpoints
    preemption: Preemption
    record: Record


def train(parts: Parts, progress: Progress) -> Ending:
    """Train from `progress` until the planned steps are done, the guard says stop, or someone asks to stop.

    A checkpoint of where it ended is on disk, unless no step was made.
    """
    config = parts.resolved.config
    planned = config.run.steps
    exit_code, reason, saved_at = DONE, "", progress.step
    while progress.step < planned:
        started = time.perf_counter()
        batch = parts.batches.next_step()
        outcome = parts.engine.forward_backward(batch, step=progress.step + 1)
        health = parts.engine.health(outcome, preempted_here=parts.preemption.requested_here)
        update = parts.engine.step(health, _learning_rate(parts, progress))
        progress = progress.after(tokens=_tokens(parts), applied=update.applied)
        record_step(parts.record, parts.engine, progress, batch, health, update, time.perf_counter() - started)

        if update.applied and progress.applied == 1:
            read_ledger(parts.engine, reduce=config.precision.reduce)  # the moments exist now
        judgement = _judge(parts, progress, health, update)
        if judgement.verdict is Verdict.ABORT:
            _record_abort(parts, progress, judgement)
            exit_code, reason = DIVERGED, judgement.reason
            break
        if health.preempted:
            exit_code, reason = PREEMPTED, "asked to stop by SIGTERM or SIGUSR1"
            break
        if _due(config.evaluate.every_steps, progress.step, planned):
            evaluate(parts, progress)
        if _due(config.checkpoint.every_steps, progress.step, planned):
            save(parts, progress)
            saved_at = progress.step
    if progress.step != saved_at:
        save(parts, progress)
    return Ending(progress, exit_code, reason)


def resume_command(resolved: Resolved) -> str:
    """The command that goes on with this run from its newest checkpoint."""
    return resolved.command if resolved.config.run.resume == "auto" else f"{resolved.command} run.resume=auto"


def evaluate(parts: Parts, progress: Progress) -> None:
    """Measure the validation loss and record it."""
    record_evaluation(parts.record, progress, parts.engine.evaluate(parts.validation()))


def save(parts: Parts, progress: Progress) -> None:
    """Save a checkpoint and record it."""
    record_checkpoint(parts.record, progress, parts.checkpoints.save(parts.engine, progress))


def _learning_rate(parts: Parts, progress: Progress) -> float:
    config = parts.resolved.config
    peak, total = config.optimizer.learning_rate, config.run.steps
    return learning_rate(config.schedule, peak=peak, applied=progress.applied, total=total)


def _tokens(parts: Parts) -> int:
    return parts.resolved.batch.global_size * parts.resolved.config.data.sequence_length


def _judge(parts: Parts, progress: Progress, health: Health, update: Update) -> Judgement:
    return judge(
        parts.resolved.config.guard,
        consecutive_skips=progress.consecutive_skips,
        scale_at_minimum=update.scale_at_minimum,
        loss=health.loss,
    )


def _due(every: int, step: int, planned: int) -> bool:
    return every > 0 and (step % every == 0 or step == planned)


def _record_abort(parts: Parts, progress: Progress, judgement: Judgement) -> None:
    where = {"step": progress.step, "tokens": progress.tokens}
    parts.record.event(
        "incident", verdict="ABORT", reason=judgement.reason, modules=[], replay=resume_command(parts.resolved), **where
    )
