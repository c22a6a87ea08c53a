"""Act on the guard's verdict. The step itself has already been discarded: masters and moments are unchanged.

SKIP and CUT_LR need nothing more. PROMOTE moves the modules that caused it to a wider dtype and CORRECT masks tokens,
both on probation. ROLLBACK loads the last good checkpoint and skips the batches since, twice as many each time.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from config.errors import UserError
from config.schema import SAMPLING_TASKS
from precision.guard import Judgement, Verdict, rollback_skip
from precision.promotions import Causes, promotable, promote
from training.parts import Parts
from training.progress import Progress
from training.record import record_incident


def roll_back(parts: Parts, progress: Progress, path: Path, *, repeat: bool = False) -> Progress:
    """Load a checkpoint and skip the batches since, unless they are to `repeat`, not having been at fault; returns the
    new progress."""
    restored = parts.load_state_dict(parts.checkpoints.load(path, parts.engine), keep_budgets=True)
    if not repeat:
        skipped = rollback_skip(parts.guard.used["rollback"], max(progress.position - restored.position, 1))
        config = parts.resolved.config
        every = config.grpo.updates if config.task in SAMPLING_TASKS else 1  # steps have their answers in common
        restored = replace(restored, position=-(-(restored.position + skipped) // every) * every)
    parts.batches.restore(restored.position)
    return restored


def react(
    parts: Parts, progress: Progress, judgement: Judgement, causes: Causes, *, repeat: bool = False
) -> tuple[Progress, Judgement]:
    """Do what the verdict asks for beyond discarding the step, and record the incident; returns the new progress, and
    the judgement, ABORT where no checkpoint can be loaded for a ROLLBACK. repeat: as for `roll_back`."""
    modules = [finding.module for _, finding in causes]
    further: dict[str, Any] = {}
    refused_at = progress
    if judgement.verdict in (Verdict.PROMOTE, Verdict.CORRECT):
        regions, key, modules, to = parts.engine.adjustable, "corrected_by", ["grpo.correction"], "mask"
        if judgement.verdict is Verdict.PROMOTE:
            key, (modules, to) = "promoted_to", promotable(regions, causes, to=parts.resolved.config.guard.promote_to)
        promote(regions, parts.promotions, modules, to=to, step=progress.step)
        further = {key: to}
    if judgement.verdict is Verdict.ROLLBACK:
        try:
            path, problem = parts.checkpoints.find("auto"), "there is none"
        except UserError as error:
            path, problem = None, str(error)
        if path is None:
            reason = f"{judgement.reason}; no checkpoint can be loaded: {problem}"
            judgement = Judgement(Verdict.ABORT, reason)
        else:
            progress = roll_back(parts, progress, path, repeat=repeat)
            further = {"rolled_back_to": str(path), "position": progress.position}
    record_incident(parts, refused_at, judgement, modules, further)
    return progress, judgement
