"""The training loop: steps, evaluations and checkpoints."""

import gc
from dataclasses import dataclass

from config.cli import BROKEN, DIVERGED, DONE, PREEMPTED, UNSAVED
from precision.guard import Verdict
from training.checkpoint.outcome import NotFinite, NotUploaded, SaveFailed
from training.parts import Parts
from training.progress import Progress
from training.record import record_checkpoint, record_evaluation, record_warnings
from training.step import train_step


@dataclass(frozen=True)
class Ending:
    """The step at which a run ended, and the reason."""

    progress: Progress
    exit_code: int
    reason: str = ""


def train(parts: Parts, progress: Progress) -> Ending:
    """Train from `progress` until the planned steps are done, the guard aborts, or a stop is requested, and save the
    last state, unless no step ran or all are done with `checkpoint.at_end` off. The ending reports a save that
    failed."""
    config, saves = parts.resolved.config, parts.checkpoints
    saving, evaluating = config.checkpoint, config.evaluate
    problem = record_saves(parts)
    planned = config.run.steps
    gc.collect()
    gc.freeze()  # else each rank would scan half a million library objects at a different step, and the others wait
    if evaluating.at_start and evaluating.every_steps and progress.position == 0:
        evaluate(parts, progress)
    if 0 < progress.step <= planned and saves.found_loss is None and _evaluates(parts, progress):
        # the session before was stopped after this step, and left the evaluation to this one
        found = evaluate(parts, progress)
        if saving.keep_best and saves.any_saved:
            problem = save_now(parts, progress, f"step {progress.step} is now evaluated", found)
    while progress.step < planned:
        with parts.watching(progress):
            progress, judgement, health = train_step(parts, progress)
        if health.save_ended:
            record_saves(parts)
        if judgement.verdict is Verdict.ABORT:
            broken = health.corruption
            # wrong masters must not replace the last checkpoint
            problem = save_now(parts, progress, "aborted") if broken is None or broken.state_is_good else None
            code = DIVERGED if broken is None else BROKEN
            return Ending(progress, code, judgement.reason + (f"; {problem}" if problem else ""))
        if judgement.verdict is Verdict.ROLLBACK:
            # so that a crash does not forget the used budget and the skipped batches
            save_now(parts, progress, "rolled back", saves.found_loss)
            continue
        if health.preempted:
            # before an evaluation, for which no time may be left
            problem = save_now(parts, progress, parts.preemption.reason)
            if isinstance(problem, NotUploaded):  # the next session resumes from the run folder, and uploads it
                return Ending(progress, PREEMPTED, f"{parts.preemption.reason}; {problem}")
            if problem is not None or progress.step < planned:
                return _unsaved(progress, problem) or Ending(progress, PREEMPTED, parts.preemption.reason)
        validation_loss = evaluate(parts, progress) if _evaluates(parts, progress) else None
        if progress.step == planned:
            if saving.at_end:
                start_save(parts, progress, validation_loss)
            problem = record_saves(parts)
        elif progress.step in saving.also_after or _due(saving.every_steps, progress.step, planned):
            start_save(parts, progress, validation_loss)
        if saves.failures >= saving.max_failures:
            return Ending(progress, UNSAVED, f"{saves.failures} saves in a row failed: {saves.last_failure}")
    skips = progress.consecutive_skips
    if skips >= config.guard.max_consecutive_skips or 2 * skips > planned:
        return Ending(progress, DIVERGED, f"the last {skips} of {planned} steps were skipped, so the run did not train")
    return _unsaved(progress, problem) or Ending(progress, DONE)


def evaluate(parts: Parts, progress: Progress) -> float:
    """Record metrics on the validation set, as a whole and by part; returns the loss on the whole."""
    evaluation = parts.engine.evaluate(parts.validation())
    if parts.self_check and parts.self_check.due_evaluation(progress.applied):
        unlike = parts.self_check.after_evaluation(evaluation, parts.validation(), progress.step)
        parts.record.event("self_check", step=progress.step, tokens=progress.tokens, **parts.self_check.finish())
        record_warnings(parts, progress, unlike)
        parts.guard.warn((each.signal, each.reason) for each in unlike)
    by_source = {name: parts.engine.evaluate(own) for name, own in parts.validation_by_source().items()}
    sample = parts.examples() or (parts.sample() if parts.resolved.config.generate.at_evaluations else "")
    record_evaluation(parts, progress, evaluation, by_source, sample=sample)
    return evaluation.loss


def start_save(parts: Parts, progress: Progress, validation_loss: float | None = None) -> None:
    """Begin to save a checkpoint in the background. A failure does not stop the run: see `checkpoint.max_failures`."""
    parts.checkpoints.start_save(parts.engine, parts.state_dict(progress), validation_loss)
    if parts.self_check:
        parts.self_check.happened("save")


def _unsaved(progress: Progress, problem: SaveFailed | None) -> Ending | None:
    """The ending of a run whose last save failed; None if it did not."""
    if problem is None:
        return None
    return Ending(progress, DIVERGED if isinstance(problem, NotFinite) else UNSAVED, str(problem))


def save_now(parts: Parts, progress: Progress, why: str, validation_loss: float | None = None) -> SaveFailed | None:
    """Save a checkpoint and wait for it; returns the error, or None. why: noted before, since it may take minutes."""
    parts.record.note(f"{why}; saving", saving=True)
    start_save(parts, progress, validation_loss)
    return record_saves(parts)


def record_saves(parts: Parts) -> SaveFailed | None:
    """Record notes and the outcomes of saves, waiting for one in progress; returns the last save's error, or None."""
    problem = None
    for line in parts.checkpoints.take_notes():
        parts.record.note(line)
    for outcome in parts.checkpoints.outcomes():
        problem = outcome if isinstance(outcome, SaveFailed) else None
        if isinstance(outcome, SaveFailed):
            parts.record.note(str(outcome), failed="checkpoint")
        else:
            record_checkpoint(parts, outcome)
    return problem


def _evaluates(parts: Parts, progress: Progress) -> bool:
    """Whether the weights after this step are evaluated."""
    section, step = parts.resolved.config.evaluate, progress.step
    also = section.every_steps > 0 and step in section.also_after
    return also or _due(section.every_steps, step, parts.resolved.config.run.steps)


def _due(every: int, step: int, planned: int) -> bool:
    return every > 0 and (step % every == 0 or step == planned)
