"""Compares whole runs: loss, validation, gradient norms, skips, and how much of a difference is chaos.

Rounding differences grow until two runs are as far apart as any two runs, in any dtype. So differences are compared
with those to *controls*, FP32 runs at a learning rate that differs by about BF16's rounding error, and their mean over
seeds with how far it scatters.

A loss scale that starts high comes down by skipping steps, each of which lowers it. That is how the scale is found, not
a defect: these steps are counted separately from later skips, and the run is compared with a twin that did not apply
them either, so that both make the same updates on the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from config.schema import ParitySection, PrecisionSection
from precision.dtypes import DTYPES
from precision.tolerance import relative, unit_roundoff
from tools.parity.judge_steps import Check
from tools.parity.power import ALPHA, POWER, detectable, half_width, pairs_needed

NUDGE = 2.0**-8
"""[fraction] BF16's unit roundoff: the relative change of the nearest control's learning rate."""
CHAOTIC = ("validation_delta", "loss_gap", "grad_norm_ratio")
"""Checks of whole runs that a sound run fails if training amplifies the rounding of its weights beyond a bound."""
AS_CHAOTIC = 3.0
"""[factor] A run more than this many times as far from FP32 as perturbed FP32 runs are is not explained by chaos."""
AGAIN = 2
"""Number of candidates from perturbed weights, where whole runs are still in doubt. Of 24 FP32 runs of a Falcon at a
rate of 0.03, 23 ended within 0.22% of each other and one 0.70% away: a median of three rarely is."""
MOST_APART = 3
"""Largest number of FP32 runs from perturbed weights. One is too few: where four draws were 0.1% to 3.5% apart in a
step's loss, the first was the one of 0.1%."""


@dataclass(frozen=True)
class Settling:
    """The steps skipped at the start of a run, while its loss scale came down from its initial value."""

    steps: Sequence[int]
    started: float
    """[factor] The loss scale before the first of them."""
    ended: float
    """[factor] The loss scale after the last, with which training began."""


@dataclass(frozen=True)
class Trajectory:
    """One run, from its events."""

    steps: Sequence[int]
    losses: Sequence[float]
    """Raw training loss of each step, in nats."""
    grad_norms: Sequence[float]
    skipped: int
    """All skipped steps, including those of `settling`."""
    nonfinite: int
    """Number of non-finite values, except overflows that the loss scale handled."""
    validation: float | None
    """Last validation loss, in nats."""
    settling: Settling | None = None
    """The settling; None if the first step was applied, or the loss scale did not settle."""
    lost: Sequence[int] = ()
    """All steps that the loss scale skipped."""


@dataclass(frozen=True)
class Runs:
    """Whole runs that are compared, one of each kind by seed."""

    candidate: Sequence[Trajectory]
    twin: Sequence[Trajectory]
    """In FP32, without the updates that the candidate's loss scale lost, at least while it settled."""
    controls: Sequence[Trajectory] = ()
    """In FP32, of the first seed."""
    whole: Trajectory | None = None
    """The first seed's twin with all updates; None if that is `twin[0]`."""

    @property
    def pairs(self) -> list[tuple[Trajectory, Trajectory]]:
        """Each candidate with its twin."""
        return list(zip(self.candidate, self.twin, strict=True))

    @property
    def of_controls(self) -> Trajectory:
        """The run to compare the controls with."""
        return self.whole or self.twin[0]


def settling_of(steps: Sequence[Mapping[str, Any]], scales: Sequence[Mapping[str, Any]]) -> Settling | None:
    """The settling of a loss scale that started high, from a run's `step` and `scale` events; None without one.

    It starts with the first step and ends with the first stable stretch: as many consecutive applied steps as were
    skipped before. Every earlier skip must have lowered the scale or used up hysteresis. A scale that never reaches
    such a stretch has not settled.
    """
    changes = {event["step"]: event for event in scales}
    skipped: list[int] = []
    applied = 0
    for event in steps:
        if event["applied"]:
            applied += 1
            if not skipped:
                return None
            if applied >= len(skipped):
                return Settling(skipped, changes[skipped[0]]["from"], changes[skipped[-1]]["to"])
            continue
        change = changes.get(event["step"])
        if change is None or not (change["reason"] == "hysteresis" or change["to"] < change["from"]):
            return None
        skipped.append(event["step"])
        applied = 0
    return None


def judge_trajectories(runs: Runs, bounds: ParitySection) -> list[Check]:
    """The checks of whole runs."""
    gap, where = max((_loss_gap(*pair) for pair in runs.pairs), key=lambda found: found[0])
    ratio = median(_norm_ratio(*pair) for pair in runs.pairs)
    nonfinite = sum(run.nonfinite for run in runs.candidate)
    larger = max(ratio, 1 / ratio) if ratio > 0 else math.inf
    apart = [_loss_gap(control, runs.of_controls)[0] for control in runs.controls]
    allowed = max(bounds.loss_gap, _twice_rms(apart))
    return [
        _validation(runs, bounds),
        Check("loss_gap", gap, allowed, gap <= allowed, where=where, note=_controls_note(apart)),
        Check("grad_norm_ratio", ratio, bounds.grad_norm_ratio, larger <= bounds.grad_norm_ratio),
        _skipped(runs.candidate, bounds),
        Check("nonfinite_events", nonfinite, bounds.nonfinite_events, nonfinite <= bounds.nonfinite_events),
    ]


def rounding_to(precision: PrecisionSection) -> float:
    """[fraction] Error of rounding a weight to the dtype that a run computes in.

    BF16's under a manifest; FP16's for FP32, whose own would leave FP32 weights as they are.
    """
    return unit_roundoff(DTYPES["bf16" if precision.compute == "bf16" or precision.path == "manifest" else "fp16"]) / 2


def in_doubt(checks: Sequence[Check]) -> bool:
    """Whether a check failed that chaos alone may fail."""
    return any(check.name in CHAOTIC and not check.passed for check in checks)


def judge_whole(
    runs: Runs, bounds: ParitySection, *, apart: Sequence[Trajectory], again: Sequence[Trajectory] = ()
) -> list[Check]:
    """`judge_trajectories`, given runs that start from the first seed's weights, perturbed as by rounding.

    apart: in FP32; a check that one of them fails, by at least 1 / AS_CHAOTIC as much as the candidate, is not judged.
    again: of the candidate; medians are compared then, since at high rates one run of many, in any dtype, ends far off.
    """
    if again:
        candidate = [median_run([runs.candidate[0], *again]), *runs.candidate[1:]]
        middle = median_run([runs.of_controls, *apart])
        first = middle if runs.twin[0] is runs.of_controls else runs.twin[0]
        runs = Runs(candidate, [first, *runs.twin[1:]], runs.controls, middle)
    checks = judge_trajectories(replace(runs, controls=[*runs.controls, *apart]), bounds)
    bits = [Runs([run], [runs.of_controls]) for run in apart]
    differing = [check for bit in bits for check in judge_trajectories(bit, bounds) if not check.passed]
    found = []
    for check in checks:
        largest = max((_off(each) for each in differing if each.name == check.name), default=0.0)
        if not check.passed and check.name in CHAOTIC and _off(check) <= AS_CHAOTIC * largest:
            why = f"not judged: chaotic at this rate: two FP32 runs a bit apart differ by {largest:.3g}"
            check = replace(check, passed=True, note="; ".join(filter(None, (why, check.note))))
        found.append(check)
    return found


def _off(check: Check) -> float:
    """[fraction] How far a whole run is from FP32's."""
    ratio = check.measured
    return max(ratio, 1 / ratio) - 1 if check.name == "grad_norm_ratio" and ratio > 0 else abs(ratio)


def median_run(runs: Sequence[Trajectory]) -> Trajectory:
    """The first run with medians in place of its losses and norms, over those of the runs that took the same steps."""
    first = runs[0]
    alike = [run for run in runs if run.steps == first.steps]
    ends = [run.validation for run in alike if run.validation is not None]
    return replace(
        first,
        losses=[_median(values) for values in zip(*(run.losses for run in alike), strict=True)],
        grad_norms=[_median(values) for values in zip(*(run.grad_norms for run in alike), strict=True)],
        validation=_median(ends) if ends else None,
    )


def _median(values: Sequence[float]) -> float:
    """Median of the finite values; the first value, which is the judged run's, if that is not finite."""
    return median(filter(math.isfinite, values)) if math.isfinite(values[0]) else values[0]


def confidence(runs: Runs, bounds: ParitySection) -> dict[str, Any]:
    """The confidence in the mean validation delta, and the shift that this many runs would find.

    {"pairs", "controls", "delta", "scatter", "degrees", "interval" (1 - 2 ALPHA), "detectable" (at POWER), "shown",
    "pairs_needed" (to find the bound)}, relative to FP32. scatter: of one delta, pooled over the deltas of the seeds
    around their mean and the controls' distances from their twin around zero; None with nothing to estimate it from:
    one pair without controls, or no validation loss. shown: whether the interval lies within the bound, which shows
    equivalence.
    """
    deltas = [delta for pair in runs.pairs if (delta := _delta(*pair)) is not None]
    found: dict[str, Any] = {"pairs": len(deltas), "controls": 0, "delta": fmean(deltas) if deltas else None}
    found |= dict.fromkeys(("scatter", "interval", "detectable", "shown", "pairs_needed"))
    apart = [delta for run in runs.controls if (delta := _delta(run, runs.of_controls)) is not None]
    degrees = len(deltas) - 1 + len(apart)
    found |= {"controls": len(apart), "degrees": max(0, degrees), "bound": bounds.validation_delta}
    if len(deltas) < len(runs.candidate) or degrees < 1 or not all(map(math.isfinite, (*deltas, *apart))):
        return found
    delta = fmean(deltas)
    squares = sum((item - delta) ** 2 for item in deltas) + sum(item**2 for item in apart)
    scatter = math.sqrt(squares / degrees)
    half = half_width(scatter, len(deltas), degrees, confidence=1 - 2 * ALPHA)
    return found | {
        "scatter": scatter,
        "interval": [delta - half, delta + half],
        "detectable": detectable(scatter, len(deltas), degrees),
        "shown": abs(delta) + half <= bounds.validation_delta,
        "pairs_needed": pairs_needed(scatter, bounds.validation_delta, controls=len(apart)),
    }


def confidence_line(found: Mapping[str, Any]) -> str:
    """`confidence` as a sentence."""
    if found["scatter"] is None:
        return (
            "One pair of runs says nothing about chance: no interval and no power. Set parity.seeds or parity.controls."
        )
    low, high = found["interval"]
    state = "shows equivalence" if found["shown"] else "does not show equivalence"
    line = (
        f"Validation loss {found['delta']:+.3%} from FP32's, {1 - 2 * ALPHA:.0%} interval {low:+.3%} to {high:+.3%} "
        f"(Student's t, {found['degrees']} degrees of freedom, {found['pairs']} pairs, {found['controls']} controls), "
        f"which {state} within {found['bound']:.3%}. This many runs detect a shift of {found['detectable']:.2%} "
        f"with probability {POWER:g}"
    )
    needed = found["pairs_needed"]
    if found["detectable"] <= found["bound"]:
        return f"{line}."
    return f"{line}; to find one of {found['bound']:.2%} takes {needed or 'more than 10,000'} pairs."


def first_departure(mine: Trajectory, other: Trajectory, gap: float) -> int | None:
    """First step at which the running medians of the loss are further apart than `gap`; None if they never are."""
    return next((step for step, distance in _gaps(mine, other) if not distance <= gap), None)


def running_median(values: Sequence[float]) -> list[float]:
    """Median of the finite values in a centred window: a twentieth of the run, at least 5; nan if none is finite."""
    half = max(5, len(values) // 20) // 2
    found = []
    for centre in range(len(values)):
        window = [value for value in values[max(0, centre - half) : centre + half + 1] if math.isfinite(value)]
        found.append(median(window) if window else math.nan)
    return found


def _skipped(runs: Sequence[Trajectory], bounds: ParitySection) -> Check:
    """The share of skipped steps among those after the loss scale settled."""
    settled = [run.settling for run in runs if run.settling is not None]
    apart = sum(len(found.steps) for found in settled)
    share = (sum(run.skipped for run in runs) - apart) / max(sum(len(run.steps) for run in runs) - apart, 1)
    notes = [
        f"apart from {len(found.steps)} while the loss scale settled: "
        f"of steps {found.steps[0]} to {found.steps[-1]}, from {found.started:g} to {found.ended:g}"
        for found in settled
    ]
    return Check("skipped_share", share, bounds.skipped_share, share <= bounds.skipped_share, note="; ".join(notes))


def _validation(runs: Runs, bounds: ParitySection) -> Check:
    """The mean delta, compared with the bound or with what chance explains, whichever is larger.

    Of several seeds that is a two-sided t-test at ALPHA of the paired deltas: a candidate shares its seed with its
    twin, so how far seeds are apart explains nothing. Of one seed it is twice the controls' root mean square distance.
    """
    known = confidence(runs, bounds)
    if known["pairs"] < len(runs.candidate):
        note = "no validation loss was recorded; set evaluate.every_steps"
        return Check("validation_delta", math.nan, bounds.validation_delta, False, note=note)
    nudged = [delta for run in runs.controls if (delta := _delta(run, runs.of_controls)) is not None]
    chance, each = _twice_rms(nudged), ""
    if known["pairs"] > 1:
        spread = known["scatter"] or 0.0
        chance = half_width(spread, known["pairs"], known["degrees"], confidence=1 - ALPHA)
        each = "deltas " + ", ".join(f"{_delta(*pair):+.3%}" for pair in runs.pairs)
    settled, lost = "", _delta(runs.twin[0], runs.of_controls)
    if runs.candidate[0].lost and lost:
        settled = f"with the updates that the loss scale lost, FP32 ends {lost:+.2%} apart"
    note = "; ".join(filter(None, [each, _controls_note(nudged), settled]))
    delta, allowed = known["delta"], max(bounds.validation_delta, chance)
    return Check("validation_delta", delta, allowed, abs(delta) <= allowed, note=note)


def _delta(mine: Trajectory, other: Trajectory) -> float | None:
    """The distance of the validation losses, relative to the other's; None if either is missing."""
    if mine.validation is None or other.validation is None:
        return None
    off = mine.validation - other.validation
    return math.copysign(relative(abs(off), abs(other.validation)), off)


def _twice_rms(distances: Sequence[float]) -> float:
    return 2 * math.sqrt(fmean(distance**2 for distance in distances)) if distances else 0.0


def _controls_note(distances: Sequence[float]) -> str:
    return f"FP32 controls: {', '.join(f'{distance:+.2%}' for distance in distances)}" if distances else ""


def _gaps(mine: Trajectory, other: Trajectory) -> list[tuple[int, float]]:
    """(step, relative distance of the running medians of the loss), by step."""
    theirs = dict(zip(other.steps, running_median(other.losses), strict=True))
    pairs = zip(mine.steps, running_median(mine.losses), strict=True)
    return [(step, relative(abs(loss - theirs[step]), abs(theirs[step]))) for step, loss in pairs if step in theirs]


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
