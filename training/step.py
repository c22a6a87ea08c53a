"""One optimizer step, judged before it is applied.

gradients -> health -> (causes, if it is not finite) -> verdict -> apply or discard -> record -> react
"""

from __future__ import annotations

import time
from contextlib import nullcontext

from data.loader import Batch
from precision.guard import Judgement, StepHealth, Verdict
from precision.observe import Observation, verify
from training.attribution import attribute
from training.engine.health import Health
from training.engine.ledger import read_ledger
from training.parts import Parts
from training.progress import Progress
from training.promotions import Causes, demote_due, promotable
from training.reactions import react
from training.record import record_causes, record_step
from training.schedule import learning_rate
from training.telemetry import Telemetry


def attempt(parts: Parts, progress: Progress) -> tuple[Progress, Judgement, Health]:
    """One optimizer step: where the run is afterwards, what the guard said, and what all ranks saw."""
    started, engine, guard = time.perf_counter(), parts.engine, parts.guard
    batch = parts.batches.next_step()
    waited = time.perf_counter() - started
    watch, telemetry = _watch(parts, progress), _due_telemetry(parts, progress)
    with watch or nullcontext(), telemetry.watching(batch) if telemetry else nullcontext():
        outcome = engine.forward_backward(batch, step=batch.position + 1)
    health = engine.health(
        outcome,
        preempted_here=parts.preemption.requested_here,
        save_ended_here=parts.checkpoints.save_ended,
        applied=progress.applied,
        skipped=progress.skipped,
        data_seconds=waited,
    )
    causes = _causes(parts, health, batch)
    measured = telemetry.finish() if telemetry and health.finite else None
    engine.measure_update = measured is not None
    seen = _seen_by_guard(parts, progress, health, causes)
    judgement = guard.judge(seen)
    update = engine.step(health, _learning_rate(parts, progress), apply=judgement.verdict is Verdict.STEP)
    progress = progress.after(tokens=_tokens(parts), applied=update.applied)
    guard.note(seen, judgement, applied=update.applied)
    seconds = time.perf_counter() - started
    record_step(parts.record, engine, progress, batch, health, update, seconds=seconds, waited=waited)
    record_causes(parts.record, progress, causes)
    if watch is not None:
        _verify_precision(parts, progress, watch)
    if measured is not None:
        where = {"step": progress.step, "tokens": progress.tokens}
        parts.record.event("telemetry", **where, **measured, update_ratio=engine.update_ratio)
    if update.applied and progress.applied == 1:
        read_ledger(engine, reduce=parts.resolved.config.precision.reduce)  # the moments exist now
    if judgement.verdict is not Verdict.STEP and not judgement.routine:
        progress = react(parts, progress, judgement, causes)
    demoted = demote_due(engine.regions, parts.promotions, guard)
    if demoted:
        parts.record.note(f"promotions taken back after their probation: {demoted}")
    return progress, judgement, health


def _watch(parts: Parts, progress: Progress) -> Observation | None:
    """An observer of the dtypes computed in, on the first step of a session and at the configured interval."""
    every = parts.resolved.config.precision.verify_every_steps
    due = progress.step == parts.first_step or (every and progress.step % every == 0)
    return Observation(parts.engine.model) if due else None


def _due_telemetry(parts: Parts, progress: Progress) -> Telemetry | None:
    every = parts.resolved.config.telemetry.every_steps
    return parts.telemetry if every and (progress.step + 1) % every == 0 else None


def _verify_precision(parts: Parts, progress: Progress, watch: Observation) -> None:
    """Hold the manifest against what was seen. Raises PrecisionMismatch, which names the module."""
    if parts.engine.regions is not None:
        verify(watch, parts.engine.regions.dtypes, may_idle=parts.engine.regions.may_idle)
    share = watch.flop_share()
    parts.record.event("precision", step=progress.step, tokens=progress.tokens, flop_share=share)


def _causes(parts: Parts, health: Health, batch: Batch) -> Causes:
    """Who made the step not finite; nothing, at no cost, when it is finite."""
    routine = parts.engine.scales_dynamically and health.loss_is_finite
    if health.finite or (routine and not parts.resolved.config.guard.attribute_overflows):
        return []
    return attribute(parts.engine, batch, step=batch.position + 1)


def _seen_by_guard(parts: Parts, progress: Progress, health: Health, causes: Causes) -> StepHealth:
    config = parts.resolved.config
    warm = progress.applied > config.schedule.warmup_steps  # before that the ratio has to be small
    return StepHealth(
        step=progress.step + 1,
        loss=health.loss,
        grad_norm=health.grad_norm,
        finite=health.finite,
        overflow_is_routine=parts.engine.scales_dynamically,
        scale_at_minimum=parts.engine.scale_at_minimum,
        consecutive_skips=progress.consecutive_skips,
        update_ratio=parts.engine.update_ratio if warm else None,
        can_promote=bool(promotable(parts.engine.regions, causes, to=config.guard.promote_to)),
        can_roll_back=parts.checkpoints.any_saved,
    )


def _learning_rate(parts: Parts, progress: Progress) -> float:
    config = parts.resolved.config
    peak, total = config.optimizer.learning_rate, config.run.steps
    scheduled = learning_rate(config.schedule, peak=peak, applied=progress.applied, total=total)
    return scheduled * parts.guard.lr_factor


def _tokens(parts: Parts) -> int:
    return parts.resolved.batch.global_size * parts.resolved.config.data.sequence_length
