"""Repeat recorded steps from the nearest checkpoint, and compare each with the record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from config.cli import DIVERGED, DONE
from config.errors import UserError
from config.printable import line
from config.resolved import Resolved
from precision.guard import Judgement
from tools.replay.recorded import Event, Recorded
from tracking.record import Record
from tracking.run_dir import RunDir
from training import distributed
from training.build import assemble
from training.checkpoint.choice import by_step, step_of
from training.checkpoint.manifest import is_whole
from training.corruption.rerun import is_exact
from training.corruption.self_check import SIGNAL, SelfCheck
from training.distributed import World
from training.engine.health import NORM_ROUNDING
from training.parts import Parts
from training.progress import Progress
from training.session import Session, session
from training.step import train_step
from training.telemetry import Telemetry

_SUMS = ("loss", "grad_norm")
_COMPARED = ("loss", "grad_norm", "loss_scale", "lr", "applied", "sample_ids_sha256")
_NOISE = 10.0
"""Where sums have no fixed order, a step may differ from the record by this factor times the repeats' difference."""
_REPEATS = 3
"""Largest number of further repeats. Two may agree by chance: with a single one, 5.5% of sound steps with normal errors
would exceed ten times the difference, with three 0.06%."""

Log = Callable[[str], object]


class Collector:
    """A sink that keeps events in memory."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        """Does nothing: there is nothing to close."""

    def of_kind(self, kind: str, step: int | None = None) -> list[Event]:
        """The events of one kind so far; if a step is given, of that step only."""
        return [event for event in self.events if event["event"] == kind and step in (None, event["step"])]


@dataclass
class Restored:
    """A run before a recorded step, restored from a checkpoint or at its start."""

    parts: Parts
    progress: Progress
    steps: list[Event]
    """The recorded steps from there up to the one that is replayed."""
    collector: Collector
    """The events that the steps record."""

    def attempt(self, recorded: Event | None) -> tuple[Event, Judgement]:
        """Run the next step, on the batch of `recorded` if given; returns its `step` event. A collective."""
        if recorded is not None:
            self.progress = replace(self.progress, position=recorded["position"])
            self.parts.batches.restore(self.progress.position)
        self.progress, judgement, _ = train_step(self.parts, self.progress)
        return self.collector.of_kind("step")[-1], judgement


class _SameChecks(SelfCheck):
    """The self-check, whose warnings the guard answers, of the steps that the run compared, on the same values."""

    def __init__(self, opened: Session, recorded: Recorded) -> None:
        super().__init__(opened.engine, opened.resolved, opened.model_config, opened.corpus)
        self._recorded = recorded

    def due(self, step: int, first: int) -> bool:
        """Whether the record says that the step was compared; of later steps, whether the config does."""
        planned = super().due(step, first)
        if step > self._recorded.step:
            return planned
        self._turn, event = self._recorded.checked.get(step, (self._turn, {"checks": {}, "skipped": {}}))
        self._recomputes = "modules" in event["checks"]
        self._whole = self._recomputes or "updates" in {**event["checks"], **event["skipped"]}
        return step in self._recorded.checked


@contextmanager
def restored(
    run_dir: RunDir,
    resolved: Resolved,
    recorded: Recorded,
    log: Log,
    *,
    world: World | None = None,
    new_scale: bool = False,
) -> Iterator[Restored]:
    """Context manager: the run at the nearest checkpoint before the step. A collective over the run's processes.

    resolved: the run's config, perhaps with another precision. world: the process group, if it exists. new_scale: start
    at `precision.loss_scale.initial`, not at the checkpoint's scale. Raises UserError if a step is not recorded.
    """
    target, collector = recorded.step, Collector()
    with session(resolved, world=world, shares=("sequence", "tensor", "expert")) as opened:
        if opened.answers is not None:
            opened.answers.keep_in(run_dir.path / "rollouts", publishes=False)
        before = (path for path in by_step(run_dir.checkpoints) if step_of(path) < target and is_whole(path))
        found: Path | None = opened.world.from_main(next(before, None) if opened.world.is_main else None)
        checkpoints = opened.saved_checkpoints(run_dir.checkpoints)
        state = checkpoints.load(found, opened.engine) if found else None
        if new_scale and state is not None:
            state = {**state, "scaler": None}
        config, engine = resolved.config, opened.engine
        judged = config.guard.warnings and config.telemetry.every_steps  # signals that the guard judges steps by
        compared = SIGNAL in config.guard.warnings and opened.world.tensor is None
        parts, progress = assemble(
            resolved,
            engine,
            opened.batches,
            record=Record([collector]),
            checkpoints=checkpoints,
            state=state,
            telemetry=Telemetry(engine, probe=False) if judged else None,
            self_check=_SameChecks(opened, recorded) if compared else None,
        )
        log(f"from {found or 'the seed'}, {target - progress.step} steps to go")
        steps = [event for event in recorded.steps if event["step"] > progress.step]
        if steps[0]["step"] != progress.step + 1:
            missing = f"the record has no step {progress.step + 1}"
            raise UserError(f"--step {target}: {missing}, and every step from {found or 'the seed'} has to be repeated")
        yield Restored(parts, progress, steps, collector)


def repeat(run_dir: RunDir, resolved: Resolved, recorded: Recorded, log: Log) -> int:
    """Repeat the steps up to the recorded one, and report. A collective over the run's processes.

    If a step differs where sums have no fixed order, up to _REPEATS more repeats show how far one may be from another.
    """
    world = distributed.join(resolved)
    try:
        made, causes = _attempts(run_dir, resolved, recorded, log, world)
        allowed: dict[str, float] = {}
        for _ in range(0 if is_exact(world.device) else _REPEATS):
            if not any(_different(now, then, allowed) for now, then in made):
                break
            log("sums have no fixed order without run.deterministic: once more, to see how far two repeats differ")
            again, _ = _attempts(run_dir, resolved, recorded, log, world)
            for key in _SUMS:
                noise = max(_distance(one[key], other[key]) for (one, _), (other, _) in zip(made, again, strict=True))
                allowed[key] = max(allowed.get(key, 0.0), _NOISE * noise, NORM_ROUNDING)
    finally:
        distributed.stop()
    differing = [now["step"] for now, then in made if not _compare(now, then, log, allowed=allowed)]
    for cause in causes:
        log(f"cause: {describe(cause)}")
    log("not reproduced: see the steps marked above" if differing else "reproduced")
    return DIVERGED if differing else DONE


def _attempts(
    run_dir: RunDir, resolved: Resolved, recorded: Recorded, log: Log, world: World
) -> tuple[list[tuple[Event, Event]], list[Event]]:
    """Each step as it is now and as it was recorded, and the causes of the last one's non-finite values."""
    with restored(run_dir, resolved, recorded, log, world=world) as run:
        made = [(run.attempt(expected)[0], expected) for expected in run.steps]
        return made, run.collector.of_kind("nonfinite", recorded.step)


def describe(cause: Event) -> str:
    """A `nonfinite` event as human-readable text."""
    largest = f", largest finite value {cause['largest_finite']:.4g}" if cause["largest_finite"] is not None else ""
    return line(
        f"rank {cause['rank']}, {cause['module']}: {cause['count']} {cause['kind']} in its {cause['tensor']}"
        f"{largest} (micro-batch {cause['micro_batch']}; {cause['seen']})"
    )


def _different(now: Event, then: Event, allowed: Mapping[str, float]) -> list[str]:
    """The compared keys that differ in a bit, sums by more than is allowed; NaN equals NaN."""
    found = [key for key in _COMPARED if repr(now[key]) != repr(then[key])]
    return [key for key in found if key not in allowed or not math.isclose(now[key], then[key], rel_tol=allowed[key])]


def _distance(one: float, other: float) -> float:
    """The relative difference of two numbers; 0 where one is not finite."""
    return abs(one - other) / max(abs(one), abs(other)) if one != other and math.isfinite(one - other) else 0.0


def _compare(now: Event, then: Event, log: Log, *, allowed: Mapping[str, float]) -> bool:
    """Compare a step with the record, and print both. allowed: relative difference of each sum; empty: equal bits."""
    different = _different(now, then, allowed)
    near = [f"{allowed[key]:.1g} of {key}" for key in _different(now, then, {}) if key not in different]
    same = "as recorded" if near else "to the bit as recorded"
    verdict = same if not different else "recorded: " + ", ".join(f"{k} {then[k]!r}" for k in different)
    if near:
        verdict += f" to {', '.join(near)}, {_NOISE:g} times what two repeats differ by"
    made = f"loss {now['loss']!r}, grad norm {now['grad_norm']!r}, applied {now['applied']}"
    log(f"step {now['step']}: {made}; {verdict}")
    return not different
