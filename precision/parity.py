"""Does half precision train the same model? Pure judgement of what was measured, against the config's `parity:` bounds.

Two kinds of evidence. *Step parity* compares single steps from the same masters on the same micro-batches: it is sharp,
because nothing has had time to grow apart, and it names modules. *Trajectory parity* compares whole runs: it is what
the user cares about, and blunt, because two healthy runs part as well. Rounding differences grow until the runs are
as far apart as any two; so with several seeds a validation delta is held against the spread that FP32 runs show among
themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Any

from config.schema import ParitySection

NEGLIGIBLE = 1e-4
"""Gradients below this share of the largest are rounding noise, such as those of a key's bias (softmax cancels it)."""
MOST_NAMED = 8
"""Modules a check names."""
SAME_LOSS = 1e-5
"""Relative difference up to which a loss counts as repeated after a restore; 0 on a CPU."""


@dataclass(frozen=True)
class Check:
    """One bound, and what was measured against it."""

    name: str
    """Key of the `parity:` section, or a name of its own."""
    measured: float
    bound: float
    passed: bool
    at_least: bool = False
    """Whether the bound is a lower one."""
    where: str = ""
    """Module and step of the worst value, or of nothing."""
    modules: tuple[str, ...] = ()
    """Modules beyond the bound, worst first, at most MOST_NAMED."""
    note: str = ""


@dataclass(frozen=True)
class Trajectory:
    """One run, as its events tell it."""

    steps: Sequence[int]
    losses: Sequence[float]
    """Raw training loss of each step, in nats."""
    grad_norms: Sequence[float]
    skipped: int
    nonfinite: int
    """Non-finite values, those of overflows aside that the loss scale answered."""
    validation: float | None
    """Last validation loss, in nats."""


@dataclass(frozen=True)
class Walk:
    """Steps measured from one point of a run; see `training.step_parity` for the fields of a step."""

    point: int
    restored: bool
    steps: Sequence[Mapping[str, Any]]
    recorded_loss: float | None = None
    """Loss that the run itself recorded on the first of these steps."""
    why: str = ""
    """Why it was not restored."""


@dataclass
class _Worst:
    """The worst value over modules and steps, and every module beyond the bound."""

    bound: float
    at_least: bool
    value: float | None = None
    where: str = ""
    beyond: dict[str, float] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def see(self, name: str, value: float, step: int) -> None:
        if math.isnan(value):
            value = -math.inf if self.at_least else math.inf
        self.seen.add(name)
        worse = self.value is None or (value < self.value if self.at_least else value > self.value)
        if worse:
            self.value, self.where = value, f"{name} at step {step}"
        if value < self.bound if self.at_least else value > self.bound:
            known = self.beyond.get(name)
            worst = min if self.at_least else max
            self.beyond[name] = value if known is None else worst(known, value)

    def check(self, name: str, note: str = "") -> Check:
        measured = self.value if self.value is not None else math.nan
        order = sorted(self.beyond, key=lambda item: self.beyond[item], reverse=not self.at_least)
        if len(order) > 1 and len(order) == len(self.seen):
            note = f"all {len(order)} modules{'; ' + note if note else ''}"
        elif len(order) > MOST_NAMED:
            note = f"{len(order)} of {len(self.seen)} modules{'; ' + note if note else ''}"
        passed = self.value is not None and not self.beyond
        return Check(name, measured, self.bound, passed, self.at_least, self.where, tuple(order[:MOST_NAMED]), note)


def judge_steps(walks: Sequence[Walk], bounds: ParitySection) -> list[Check]:
    """The checks of single steps."""
    attempted = [step for walk in walks for step in walk.steps]
    taken = [step for step in attempted if step["applied"]]
    checks = [
        _over(attempted, "module_error", bounds.module_error, lambda step: step["own_error"].items()),
        _over(taken, "gradient_error", bounds.gradient_error, _gradients("relative_error"), note=_scale_note(taken)),
        _over(taken, "gradient_cosine", bounds.gradient_cosine, _gradients("cosine"), at_least=True),
        _over(taken, "sign_agreement", bounds.sign_agreement, _gradients("sign_agreement"), at_least=True),
        _over(taken, "update_error", bounds.update_error, lambda step: _by_module(step["update_error"]).items()),
        _over(taken, "grad_norm_error", bounds.update_error, _norm_error),
        _over(attempted, "weight_drift", bounds.weight_drift, _drift, floor=0.0),
    ]
    stuck = [str(walk.point) for walk in walks if walk.restored and not any(step["applied"] for step in walk.steps)]
    if stuck:
        note = f"no step was applied after step {', '.join(stuck)}"
        checks.append(Check("applied_points", len(walks) - len(stuck), len(walks), False, at_least=True, note=note))
    return [*checks, _restored(walks, bounds)]


def first_parting(walks: Sequence[Walk], bounds: ParitySection) -> dict[str, Any] | None:
    """The first module, in the order of execution, whose own error is beyond the bound, at the first step it shows."""
    for walk in walks:
        for step in walk.steps:
            for name in step["order"]:
                if not step["own_error"][name] <= bounds.module_error:
                    return {"step": step["step"], "module": name, "own_error": step["own_error"][name]}
    return None


def judge_trajectories(
    candidate: Sequence[Trajectory], twin: Sequence[Trajectory], bounds: ParitySection
) -> list[Check]:
    """The checks of whole runs; both sequences by seed."""
    pairs = list(zip(candidate, twin, strict=True))
    steps = sum(len(run.steps) for run in candidate)
    gap, where = max((_loss_gap(mine, other) for mine, other in pairs), key=lambda found: found[0])
    ratio = median(_norm_ratio(mine, other) for mine, other in pairs)
    skipped = sum(run.skipped for run in candidate) / max(steps, 1)
    nonfinite = sum(run.nonfinite for run in candidate)
    larger = max(ratio, 1 / ratio) if ratio > 0 else math.inf
    return [
        _validation(pairs, bounds),
        Check("loss_gap", gap, bounds.loss_gap, gap <= bounds.loss_gap, where=where),
        Check("grad_norm_ratio", ratio, bounds.grad_norm_ratio, larger <= bounds.grad_norm_ratio),
        Check("skipped_share", skipped, bounds.skipped_share, skipped <= bounds.skipped_share),
        Check("nonfinite_events", nonfinite, bounds.nonfinite_events, nonfinite <= bounds.nonfinite_events),
    ]


def first_departure(mine: Trajectory, other: Trajectory, gap: float) -> int | None:
    """First step at which the running medians of the loss are further apart than `gap`; None if they never are."""
    return next((step for step, distance in _gaps(mine, other) if not distance <= gap), None)


def running_median(values: Sequence[float]) -> list[float]:
    """Median of the finite values in a centred window: a twentieth of the run, at least 5; nan where none is finite."""
    half = max(5, len(values) // 20) // 2
    found = []
    for centre in range(len(values)):
        window = [value for value in values[max(0, centre - half) : centre + half + 1] if math.isfinite(value)]
        found.append(median(window) if window else math.nan)
    return found


def _validation(pairs: list[tuple[Trajectory, Trajectory]], bounds: ParitySection) -> Check:
    """The mean delta against the bound, or against two standard errors of the FP32 runs' own mean if that is more."""
    both = [(mine.validation, other.validation) for mine, other in pairs]
    if any(mine is None or other is None for mine, other in both):
        note = "no validation loss was recorded; set evaluate.every_steps"
        return Check("validation_delta", math.nan, bounds.validation_delta, False, note=note)
    deltas = [(mine - other) / other for mine, other in both if mine is not None and other is not None]
    reference = [other for _, other in both if other is not None]
    allowed, note = bounds.validation_delta, ""
    if len(reference) > 1:
        spread = stdev(reference) / fmean(reference)
        allowed = max(allowed, 2 * spread * math.sqrt(2 / len(reference)))
        each = ", ".join(f"{delta:+.3%}" for delta in deltas)
        note = f"FP32 from seed to seed: standard deviation {spread:.3%}; deltas {each}"
    delta = fmean(deltas)
    return Check("validation_delta", delta, allowed, abs(delta) <= allowed, note=note)


def _gaps(mine: Trajectory, other: Trajectory) -> list[tuple[int, float]]:
    """(step, relative distance of the running medians of the loss) over the steps that both have."""
    theirs = dict(zip(other.steps, running_median(other.losses), strict=True))
    own = zip(mine.steps, running_median(mine.losses), strict=True)
    return [(step, abs(loss - theirs[step]) / theirs[step]) for step, loss in own if step in theirs]


def _loss_gap(mine: Trajectory, other: Trajectory) -> tuple[float, str]:
    gaps = _gaps(mine, other)
    if not gaps:
        return math.inf, "the runs have no step in common"
    step, worst = max(gaps, key=lambda item: math.inf if math.isnan(item[1]) else item[1])
    return (math.inf if math.isnan(worst) else worst), f"step {step}"


def _norm_ratio(mine: Trajectory, other: Trajectory) -> float:
    theirs = dict(zip(other.steps, other.grad_norms, strict=True))
    ratios = [
        norm / theirs[step]
        for step, norm in zip(mine.steps, mine.grad_norms, strict=True)
        if math.isfinite(norm) and theirs.get(step, 0.0) > 0
    ]
    return median(ratios) if ratios else math.inf


def _over(
    steps: Sequence[Mapping[str, Any]],
    name: str,
    bound: float,
    values: Callable[[Mapping[str, Any]], Iterable[tuple[str, float]]],
    *,
    at_least: bool = False,
    note: str = "",
    floor: float | None = None,
) -> Check:
    worst = _Worst(bound, at_least, value=floor)
    for step in steps:
        for module, value in values(step):
            worst.see(module, float(value), step["step"])
    return worst.check(name, note)


def _gradients(what: str) -> Callable[[Mapping[str, Any]], Iterable[tuple[str, float]]]:
    """Worst agreement of a module's gradients, for those that are more than noise."""

    def values(step: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
        norms = step["reference_norms"]
        floor = NEGLIGIBLE * max(norms.values(), default=0.0)
        agreement = {name: found[what] for name, found in step["parameters"].items() if norms[name] > floor}
        return _by_module(agreement, worst=max if what == "relative_error" else min).items()

    return values


def _by_module(values: Mapping[str, float], worst: Callable[..., float] = max) -> dict[str, float]:
    """Parameter name to value -> module name to the worst of its parameters."""
    found: dict[str, float] = {}
    for name, value in values.items():
        module = name.rpartition(".")[0]
        found[module] = worst(found[module], value) if module in found else value
    return found


def _drift(step: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    return _by_module(step["drift"]).items()


def _norm_error(step: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """The norm that the run reports against that of the gradient it reduced."""
    own = step["own_grad_norm"]
    yield "(gradient norm)", abs(step["grad_norm"] - own) / own if own else abs(step["grad_norm"])


def _scale_note(steps: Sequence[Mapping[str, Any]]) -> str:
    """A factor on all gradients, which is what a wrong loss scale or a lost micro-batch looks like."""
    ratios = [step["own_grad_norm"] / step["reference_grad_norm"] for step in steps if step["reference_grad_norm"]]
    ratio = median(ratios) if ratios else 1.0
    return f"the whole gradient's norm is {ratio:.3f} of FP32's" if abs(ratio - 1) > 0.05 else ""


def _restored(walks: Sequence[Walk], bounds: ParitySection) -> Check:
    bad = []
    for walk in walks:
        known = walk.recorded_loss
        loss = walk.steps[0]["loss"] if walk.steps else math.nan
        if not walk.restored:
            bad.append(f"step {walk.point}: {walk.why}")
        elif known is not None and not abs(loss - known) <= SAME_LOSS * abs(known):
            bad.append(f"step {walk.point}: loss {loss:.6f} after restoring, {known:.6f} in the run")
    share = 1 - len(bad) / max(len(walks), 1)
    passed = share >= bounds.restored_share
    return Check("restored_share", share, bounds.restored_share, passed, at_least=True, note="; ".join(bad))
