"""Find the first step at which a run departs from its FP32 twin, and the first module within that step.

Healthy trajectories drift apart, so each step is recomputed as the run computed it, and again in plain FP32 from the
same masters on the same batch (`tools.parity.steps`), judged by the `parity:` bounds of the run's config; dropout is
off. A binary search finds the first checkpoint whose next steps exceed the bounds; then every step from the checkpoint
before it on is recomputed. An error confined to one step is found only if that walk passes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from config.cli import DIVERGED, DONE
from config.errors import UserError
from config.printable import line
from config.resolved import Resolved
from config.schema import ParitySection
from tools.parity.judge_steps import IN_A_STEP, SAME_LOSS, Check, Walk, first_divergence, gradient_errors, judge_steps
from tools.parity.steps import Recomputed
from tools.replay.recorded import Event, Recorded
from tools.replay.repeat import Log
from tracking.run_dir import RunDir
from training import distributed
from training.checkpoint.choice import by_step, step_of
from training.checkpoint.manifest import is_whole
from training.session import Session, session

PROBED = 2
"""Applied steps judged at a checkpoint: the first shows wrong computation, the second the wrong state after it."""
_FORWARD, _BACKWARD = "module_error", ("gradient_error", "gradient_cosine", "sign_agreement")


@dataclass(frozen=True)
class Leaving:
    """The first check in a step that exceeds its bound."""

    step: int
    check: str
    module: str
    """The module beyond the bound; empty if it is the whole step."""
    measured: float
    bound: float
    note: str

    def text(self) -> str:
        """The human-readable finding."""
        where = f", in {self.module}" if self.module else ", in the whole step"
        note = f" ({self.note})" if self.note else ""
        numbers = f"{self.check} {self.measured:.4g}, bound {self.bound:.4g}"
        return f"the run departs from its FP32 twin at step {self.step}{where}: {numbers}{note}"


def leaving(measured: Mapping[str, Any], bounds: ParitySection) -> Leaving | None:
    """The first bound that a measured step exceeds, in the order in which a step computes; None if it exceeds none."""
    walk, step = Walk(0, True, [measured]), int(measured["step"])
    beyond = [check for check in judge_steps([walk], bounds) if not check.passed and check.where]
    if not beyond:
        return None
    places = {name: place for place, name in enumerate(IN_A_STEP)}
    check = min(beyond, key=lambda check: places.get(check.name, len(places)))
    module, value = check.modules[0], check.measured
    if check.name == _FORWARD:
        found = first_divergence([walk], bounds)
        assert found is not None
        module, value = found["module"], float(found["own_error"])
    elif check.note.startswith("all "):
        module = ""
    elif check.name in _BACKWARD:
        module, value = _first_backward(check, measured)
    return Leaving(step, check.name, module, value, check.bound, check.note)


def _first_backward(check: Check, measured: Mapping[str, Any]) -> tuple[str, float]:
    """The module beyond the bound whose gradients backward computes first: the last one in the forward pass."""
    beyond = dict.fromkeys(check.modules, check.measured)
    if check.name == "gradient_error":
        beyond = {name: value for name, value in gradient_errors(measured) if not value <= check.bound}
    order = {name: place for place, name in enumerate(measured["order"])}
    return max(beyond.items(), key=lambda item: order.get(item[0], -1))


def search(points: Sequence[int], leaves: Callable[[int], int | None]) -> tuple[int, int | None]:
    """Binary search: the last point whose steps hold, or 0, and the step at which those of the next point leave.

    points: ascending. leaves: the first step after a point beyond the bounds; None: all hold. It is called at most
    ceil(log2(points + 1)) times. The second result is None if the steps of every point asked about hold.
    """
    good, bad, at = -1, len(points), None
    while bad - good > 1:
        middle = (good + bad) // 2
        step = leaves(points[middle])
        if step is None:
            good = middle
        else:
            bad, at = middle, step
    return (points[good] if good >= 0 else 0), at


class Walker:
    """Recomputes a run's recorded steps and measures them. Every method is a collective."""

    def __init__(self, opened: Session, run_dir: RunDir, steps: Mapping[int, Event], log: Log) -> None:
        """steps: the run's `step` events by step."""
        self._run, self._steps, self._log = Recomputed(opened, run_dir), steps, log
        self._bounds = opened.resolved.config.parity

    def walk(self, point: int, last: int) -> Iterator[tuple[dict[str, Any], Leaving | None]]:
        """The steps after a checkpoint (0: from the seed), each with its measurements and its first exceeded bound.

        Ends with step `last`. The seed requires a session that has loaded no checkpoint.
        """
        batches, applied = self._run.batches, self._run.restored(point).applied
        for number in range(point + 1, last + 1):
            if number not in self._steps:
                raise UserError(f"--bisect: the record has no step {number}, which has to be repeated")
            recorded = self._steps[number]
            batches.restore(recorded["position"])
            measured = self._run.parity.step(
                batches.next_step(), applied=applied, lr=recorded["lr"], apply=recorded["applied"], dropped=True
            )
            applied += measured["applied"]
            found = leaving({"step": number, **measured}, self._bounds)
            loss, then = measured.get("loss_with_dropout", measured["loss"]), recorded["loss"]
            text = f"step {number}: loss {measured['loss']:.6g}, FP32 {measured['reference_loss']:.6g}"
            if "loss_with_dropout" in measured:
                text += f", with dropout {loss:.6g}"
            if abs(loss - then) > SAME_LOSS * abs(then):
                text += f", recorded {then:.6g}: not reproduced"
            self._log(f"{text}; {'within the bounds' if found is None else found.check + ' beyond its bound'}")
            yield measured, found

    def leaves(self, point: int, last: int) -> int | None:
        """The first step to depart from FP32 among PROBED applied ones after a checkpoint; None: none does."""
        self._log(f"checkpoint of step {point}:")
        applied = 0
        for measured, found in self.walk(point, last):
            if found is not None:
                return found.step
            applied += measured["applied"]
            if applied == PROBED:
                break
        return None


def bisect(run_dir: RunDir, resolved: Resolved, recorded: Recorded, log: Log) -> int:
    """Find the first step that departs and its first module; DIVERGED, or DONE if none does. A collective.

    recorded: the last step.
    """
    steps, last = {event["step"]: event for event in recorded.steps}, recorded.step
    world = distributed.join(resolved)
    try:
        saved = [step_of(path) for path in by_step(run_dir.checkpoints) if is_whole(path)] if world.is_main else []
        points = world.from_main(sorted(point for point in saved if point < last and point + 1 in steps))
        with session(resolved, world=world, shares=("sequence", "tensor")) as opened:
            corpus, probes = opened.corpus, Walker(opened, run_dir, steps, log)
            start, left = search(points, lambda point: probes.leaves(point, last))
            last = left or last
        log(f"every step from {f'the checkpoint of step {start}' if start else 'the seed'} on, to step {last}:")
        with session(resolved, corpus=corpus, world=world, shares=("sequence", "tensor")) as opened:
            walked = Walker(opened, run_dir, steps, log).walk(start, last)
            found = next((found for _, found in walked if found is not None), None)
    finally:
        distributed.stop()
    if found is not None:
        log(line(found.text()))
        return DIVERGED
    if left is not None:
        log(f"step {left} exceeds the bounds from a later checkpoint, not from step {start}: the saved state is wrong")
        return DIVERGED
    within = f"{len(points)} checkpoints, and steps {start + 1} to {last}, are within the bounds"
    log(f"the run matches its FP32 twin: {within}")
    return DONE
