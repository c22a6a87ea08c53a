"""Compares whole runs: loss, validation, gradient norms, skips, and how much of a difference is chaos.

Rounding differences grow until two runs are as far apart as any two, in any dtype. So differences are compared with
those of FP32 runs among themselves: from seed to seed, or from *controls*, FP32 runs at a learning rate that differs by
about BF16's rounding error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from config.schema import ParitySection
from precision.parity import Check

NUDGE = 2.0**-8
"""[fraction] BF16's unit roundoff: the relative change of the nearest control's learning rate."""


@dataclass(frozen=True)
class Trajectory:
    """One run, from its events."""

    steps: Sequence[int]
    losses: Sequence[float]
    """Raw training loss of each step, in nats."""
    grad_norms: Sequence[float]
    skipped: int
    nonfinite: int
    """Non-finite values, without those of overflows that the loss scale handled."""
    validation: float | None
    """Last validation loss, in nats."""


def control_factor(index: int) -> float:
    """What the learning rate of the control of that index, from 0, is multiplied by: 1 + 2^-8, 1 - 2^-8, 1 + 2^-7."""
    return 1 + (-1) ** index * NUDGE * (index // 2 + 1)


def judge_trajectories(
    candidate: Sequence[Trajectory],
    twin: Sequence[Trajectory],
    bounds: ParitySection,
    controls: Sequence[Trajectory] = (),
) -> list[Check]:
    """The checks of whole runs; candidate and FP32 twin by seed, controls of the first seed."""
    pairs = list(zip(candidate, twin, strict=True))
    steps = sum(len(run.steps) for run in candidate)
    gap, where = max((_loss_gap(mine, other) for mine, other in pairs), key=lambda found: found[0])
    ratio = median(_norm_ratio(mine, other) for mine, other in pairs)
    skipped = sum(run.skipped for run in candidate) / max(steps, 1)
    nonfinite = sum(run.nonfinite for run in candidate)
    larger = max(ratio, 1 / ratio) if ratio > 0 else math.inf
    apart = [_loss_gap(control, twin[0])[0] for control in controls]
    allowed = max(bounds.loss_gap, _twice_rms(apart))
    return [
        _validation(pairs, bounds, controls),
        Check("loss_gap", gap, allowed, gap <= allowed, where=where, note=_controls_note(apart)),
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


def _validation(
    pairs: list[tuple[Trajectory, Trajectory]], bounds: ParitySection, controls: Sequence[Trajectory]
) -> Check:
    """The mean delta, compared with the bound or with the differences among FP32 runs, whichever is larger."""
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
    nudged = [(run.validation - reference[0]) / reference[0] for run in controls if run.validation is not None]
    allowed = max(allowed, _twice_rms(nudged))
    note = "; ".join(filter(None, [note, _controls_note(nudged)]))
    delta = fmean(deltas)
    return Check("validation_delta", delta, allowed, abs(delta) <= allowed, note=note)


def _twice_rms(distances: Sequence[float]) -> float:
    return 2 * math.sqrt(fmean(distance**2 for distance in distances)) if distances else 0.0


def _controls_note(distances: Sequence[float]) -> str:
    return f"FP32 controls: {', '.join(f'{distance:+.2%}' for distance in distances)}" if distances else ""


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
