"""One optimizer step, from the batch to the record.

forward, backward -> norm -> (repeat, if suspicious) -> (attribute, if not finite) -> judge -> apply or discard ->
record -> react
"""

import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from data.batches.loader import Batch
from modeling.linear_cross_entropy import is_making_gradients
from precision.guard import Judgement, Verdict
from precision.inner_dtypes import over_ranks, promises
from precision.observe import Observation, verify
from precision.promotions import Causes, demote_due, promotable
from precision.step_health import Health
from training.attribution import attribute
from training.corruption.checks import Events
from training.early_warnings import EarlyWarning
from training.engine.health import Outcome
from training.engine.ledger import read_ledger
from training.parts import Parts
from training.progress import Progress
from training.reactions import react
from training.record import record_causes, record_step, record_warnings
from training.schedule import scheduled_rate


def train_step(parts: Parts, progress: Progress) -> tuple[Progress, Judgement, Health]:
    """One attempted step: the progress afterwards, the judgement, and the health that all ranks saw. A collective."""
    started, config = time.perf_counter(), parts.resolved.config
    engine, guard, record = parts.engine, parts.guard, parts.record
    batch = parts.batches.next_step()
    waited = time.perf_counter() - started

    # Forward and backward of every micro-batch. If due, dtypes and gradients are observed.
    watch, checks, every = _due_watch(parts, progress), parts.checks, config.telemetry.every_steps
    telemetry = parts.telemetry if every and (progress.step + 1) % every == 0 else None
    signing = checks.signing(progress.step + 1) if checks else nullcontext()
    watching = _watching(parts, watch, batch)  # inside telemetry, whose probe runs an FP32 pass of its own
    check = parts.self_check
    compared = check if check and check.due(progress.step + 1, parts.first_step + 1) else None
    comparing = compared.watching(batch, progress.position) if compared else nullcontext()
    with telemetry.watching(batch) if telemetry else nullcontext(), signing, watching, comparing:
        outcome = engine.forward_backward(batch, step=batch.position + 1)

    # The norm of the reduced gradients, and one small gather, so that every rank decides alike.
    measure = partial(
        engine.health,
        progress=progress,
        preempted_here=parts.preemption.requested_here,
        save_ended_here=parts.checkpoints.save_ended,
        data_seconds=waited,
    )
    events: Events = []
    if checks is None:
        health = measure(outcome)
    else:  # values that differ are repaired, and a suspicious step is repeated
        health = measure(outcome, checks=checks.numbers(progress.step + 1), repeats=checks.reexecutes)
        again = partial(measure, repeats=True)
        outcome, health, events = checks.examine(batch, outcome, health, again=again, suspicion=guard.suspicion)
    causes = _find_causes(parts, health, batch, outcome)
    health = health.with_causes([finding for _, finding in causes]) if causes else health
    warnings = parts.warnings.before_step(health)
    unlike = compared.after_passes(outcome, health) if compared else []
    telemetry = telemetry or (parts.telemetry if warnings else None)  # to name the module whose gradients jumped
    measured = telemetry is not None and health.finite
    if telemetry is not None and measured:
        telemetry.measure()
    elif telemetry is not None:
        telemetry.forget()

    # Judge the step before the optimizer sees it, then apply its gradients or discard them.
    guard.warn((each.signal, each.reason) for each in [*parts.warnings.jumps, *unlike])
    modules, _ = promotable(engine.adjustable, causes, to=config.guard.promote_to)
    judgement = guard.judge(health, can_promote=bool(modules), can_roll_back=parts.checkpoints.any_saved)
    rate = scheduled_rate(config, progress.applied) * guard.lr_factor
    apply = judgement.verdict is Verdict.STEP
    if checks and apply:
        checks.before_update()
    if compared and apply:
        compared.before_update()
    update = engine.step(health, rate, apply=apply)
    later: list[EarlyWarning] = []
    if check:
        check.follow(health, update, lr=rate, applied=progress.applied, factor=guard.lr_factor)
    if compared and update.applied:
        factor = guard.lr_factor
        later = compared.after_update(health, scale=update.loss_scale, applied=progress.applied, factor=factor)
    progress = progress.after(tokens=batch.tokens, applied=update.applied)
    if checks and update.applied:
        checks.after_update(health, update, applied=progress.applied)
    warm = progress.applied > config.schedule.warmup_steps
    guard.note(health, judgement, applied=update.applied, update_ratio=update.update_ratio if warm else None)

    # Record it, and react to what was wrong with it.
    record_step(parts, progress, batch, health, update, seconds=time.perf_counter() - started, waited=waited)
    record_causes(parts, progress, causes)
    for event, fields in events:
        record.event(event, step=progress.step, tokens=progress.tokens, **fields)
    warnings += parts.warnings.after_step(health, applied=update.applied, warm=warm)
    if watch is not None:
        _verify_precision(parts, progress, watch)
    if telemetry is not None and measured:
        fields = telemetry.finish(applied=update.applied, clip=update.clip_coefficient)
        measures = {**fields, "second_moment_age": parts.warnings.memory_age}
        record.event("telemetry", step=progress.step, tokens=progress.tokens, **measures)
        warnings += parts.warnings.after_telemetry(progress.step, fields, warm=warm)
    if compared:
        record.event("self_check", step=progress.step, tokens=progress.tokens, **compared.finish())
    record_warnings(parts, progress, [*warnings, *unlike, *later])
    guard.warn((each.signal, each.reason) for each in [*warnings, *later] if each.signal != "gradient_jump")
    if update.applied and progress.applied == 1:
        read_ledger(engine, reduce=config.precision.reduce)  # the optimizer's states exist now: check their dtypes
    if judgement.verdict is not Verdict.STEP and not judgement.routine:
        progress, judgement = react(parts, progress, judgement, causes, repeat=health.corruption is not None)
    demoted = demote_due(engine.adjustable, parts.promotions, guard)
    if demoted:
        record.note(f"promotions taken back after their probation: {demoted}", demoted=demoted)
    return progress, judgement, health


def _due_watch(parts: Parts, progress: Progress) -> Observation | None:
    """An observer of compute dtypes, if due: on the first step of a session and at the configured interval."""
    every = parts.resolved.config.precision.verify_every_steps
    due = progress.step == parts.first_step or (every and progress.step % every == 0)
    return Observation(parts.engine.model, in_backward=is_making_gradients) if due else None


def _watching(parts: Parts, watch: Observation | None, batch: Batch) -> AbstractContextManager[object]:
    """Context around the passes of a step, observed or not; compiled blocks, which run other code under an observer,
    are observed in a separate forward pass here. A collective."""
    if watch is None or not parts.resolved.config.model.compile:
        return watch or nullcontext()
    with watch:
        parts.engine.forward_beside(batch)
    return nullcontext()


def _verify_precision(parts: Parts, progress: Progress, watch: Observation) -> None:
    """Compare the observed dtypes with the manifest, and record them. A collective. Raises PrecisionMismatch, which
    names the module. Sums inside a module in a low dtype are only recorded: a model may intend them, the parity gate
    judges."""
    regions = parts.engine.regions
    report = watch.inner.report(**promises(parts.resolved.config, parts.engine.compute, regions))
    inner = over_ranks(parts.engine.world.gather_objects(report))
    if regions is not None:
        verify(watch, regions.dtypes, may_idle=regions.may_idle)
    share = watch.flop_share()
    parts.record.event("precision", step=progress.step, tokens=progress.tokens, flop_share=share, inner=inner)


def _find_causes(parts: Parts, health: Health, batch: Batch, outcome: Outcome) -> Causes:
    """The rank, module and tensor that made the step non-finite; none if the machine is at fault."""
    ignored = health.routine_overflow and not parts.resolved.config.guard.attribute_overflows
    if health.finite or health.corruption is not None or ignored:
        return []
    return attribute(parts.engine, batch, outcome, step=batch.position + 1)
