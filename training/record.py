"""The events of a run; docs/run-folder.md has their fields."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.batches.loader import Batch, sample_ids_sha256
from precision.guard import Judgement
from precision.promotions import Causes
from precision.step_health import Health
from training.checkpoint.outcome import Saved
from training.early_warnings import EarlyWarning
from training.engine.health import Evaluation, Update
from training.engine.tensors import momentum_norm
from training.parts import Parts
from training.progress import Progress


def record_step(
    parts: Parts, progress: Progress, batch: Batch, health: Health, update: Update, *, seconds: float, waited: float
) -> None:
    """The `step` event, and a `scale` event, a collective, when the loss scale or its hysteresis changed. progress:
    after the step. seconds: the whole step's. waited: [s] for the batch."""
    record, where = parts.record, {"step": progress.step, "tokens": progress.tokens}
    for fault in parts.resolved.config.faults:
        if fault.step == batch.position + 1:
            record.event("fault", **where, kind=fault.kind, rank=fault.rank, module=fault.module)
    further: dict[str, Any] = {"metrics": health.metrics} if health.metrics else {}
    if batch.source_names:
        known = batch.labels_by_source
        further["labels_by_source"] = health.counts_by_source if known is None else known
        further["loss_by_source"] = health.loss_by_source
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
        data_seconds=waited,
        tokens_per_second=batch.tokens / seconds,
        memory_bytes=health.memory_bytes,
        by_rank=health.by_rank,
        sample_ids_sha256=sample_ids_sha256(batch.sample_ids),
        position=batch.position,
        **further,
    )
    if (change := update.scale_change) is not None:
        record.scale(
            **where,
            previous=change.old,
            new=change.new,
            reason=change.reason,
            consecutive_overflows=change.consecutive_overflows,
            lr=update.lr,
            momentum_norm=momentum_norm(parts.engine),
        )


def record_warnings(parts: Parts, progress: Progress, warnings: Sequence[EarlyWarning]) -> None:
    """One `warning` event each. progress: after the step."""
    for warning in warnings:
        fields = {**asdict(warning), "modules": list(warning.modules)}
        parts.record.event("warning", step=progress.step, tokens=progress.tokens, **fields)


def record_causes(parts: Parts, progress: Progress, causes: Causes) -> None:
    """One `nonfinite` event for each cause, first causes first."""
    sequence, tensor = parts.resolved.batch.sequence, parts.resolved.batch.tensor  # numbers of ranks that share one
    for rank, finding in causes:
        further = {"slice": rank % sequence + 1, "slices": sequence} if sequence > 1 else {}
        if tensor > 1:
            further |= {"tensor_slice": rank % tensor + 1, "tensor_slices": tensor}
        fields = {name: value for name, value in asdict(finding).items() if name != "order"}
        parts.record.event("nonfinite", step=progress.step, tokens=progress.tokens, rank=rank, **fields, **further)


def record_incident(
    parts: Parts, progress: Progress, judgement: Judgement, modules: list[str], further: dict[str, Any]
) -> None:
    """The `incident` event. progress: after the refused step. further: fields of the reaction."""
    run = parts.resolved.config.run
    folder = str(Path(run.dir).expanduser() / run.name)
    parts.record.event(
        "incident",
        step=progress.step,
        tokens=progress.tokens,
        verdict=judgement.verdict.value,
        reason=judgement.reason,
        modules=list(dict.fromkeys(modules)),
        replay=f"python -m tools.replay {shlex.quote(folder)} --step {progress.step}",
        **further,
    )


def record_evaluation(
    parts: Parts, progress: Progress, whole: Evaluation, by_source: dict[str, Evaluation], *, sample: str
) -> None:
    """The `eval` event. whole: on the validation set; by_source: on each named part. sample: text sampled then."""
    further: dict[str, Any] = {"metrics": whole.metrics} if whole.metrics else {}
    if sample:
        further["sample"] = sample
    if by_source:
        further["by_source"] = {name: evaluation.loss for name, evaluation in by_source.items()}
    where = {"step": progress.step, "tokens": progress.tokens}
    parts.record.event("eval", **where, loss=whole.loss, perplexity=whole.perplexity, **further)


def record_checkpoint(parts: Parts, saved: Saved) -> None:
    """The `checkpoint` event, of the step that was saved: events of later steps may precede it."""
    fields = asdict(saved) | {"path": saved.url or str(saved.path)}
    del fields["url"]
    parts.record.event("checkpoint", **fields)
