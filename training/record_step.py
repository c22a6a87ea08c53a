"""What the loop tells the record, in the words of the event table."""

from __future__ import annotations

import math

from data.loader import Batch, sample_ids_sha256
from tracking.record import Record
from training.checkpoint import Saved
from training.engine import Engine, Health, Update
from training.progress import Progress


def record_step(
    record: Record,
    engine: Engine,
    progress: Progress,
    batch: Batch,
    health: Health,
    update: Update,
    seconds: float,
) -> None:
    """The `step` event, and a `scale` event when the loss scale or its hysteresis changed.

    progress: after the step. seconds: of the whole step, data wait included. The momentum norm of a scale event is a
    collective; every rank sees the same change, so every rank comes here.
    """
    where = {"step": progress.step, "tokens": progress.tokens}
    tokens = batch.sample_ids.size * batch.input_ids.shape[-1]
    record.event(
        "step",
        **where,
        loss=health.loss,
        grad_norm=health.grad_norm,
        clip_coefficient=update.clip_coefficient,
        lr=update.lr,
        loss_scale=update.loss_scale,
        applied=update.applied,
        skipped_total=progress.skipped,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        memory_bytes=health.memory_bytes,
        sample_ids_sha256=sample_ids_sha256(batch.sample_ids),
    )
    if update.scale_change is not None:
        record.scale(
            **where,
            previous=update.scale_change.old,
            new=update.scale_change.new,
            reason=update.scale_change.reason,
            consecutive_overflows=progress.consecutive_skips,
            lr=update.lr,
            momentum_norm=engine.momentum_norm(),
        )


def record_evaluation(record: Record, progress: Progress, loss: float) -> None:
    """The `eval` event. loss: nats per label token of the validation set."""
    perplexity = math.exp(loss) if loss < 700 else math.inf
    record.event("eval", step=progress.step, tokens=progress.tokens, loss=loss, perplexity=perplexity)


def record_checkpoint(record: Record, progress: Progress, saved: Saved) -> None:
    """The `checkpoint` event. The save is synchronous: the loop stalls for all of it."""
    record.event(
        "checkpoint",
        step=progress.step,
        tokens=progress.tokens,
        path=str(saved.path),
        seconds=saved.seconds,
        stall_seconds=saved.seconds,
        bytes=saved.bytes,
        verified=False,
    )
