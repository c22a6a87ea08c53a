"""The median stopping rule of Vizier, which decides that a trial is hopeless. Pure functions.

Golovin et al. 2017, Google Vizier: A Service for Black-Box Optimization, section 3.2.2: a trial is stopped at step s if
its best objective by s is strictly worse than the median of the running averages up to s of the other trials'
objectives. Here the objective is a loss, reported at an interval of steps; the others are all trials that have reached
step s, ended or not (Vizier uses completed ones); and there is a tolerance factor, which Vizier does not have. A loss
may be negative, such as a negated reward, so the tolerance is relative to the absolute value of the median.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from config.schema import limit


@dataclass(frozen=True)
class Hopeless:
    after_steps: int = limit(50, at_least=1)
    """[steps] No trial is stopped before this step."""
    every_steps: int = limit(10, at_least=1)
    """[steps] Steps per report, which is their mean training loss."""
    factor: float = limit(1.0, at_least=1.0)
    """[factor] The best loss may exceed the median of the others by (factor - 1) x |median|."""
    trials: int = limit(3, at_least=1)
    """[trials] Number of others that must have reached the step."""
    loss: Literal["training", "validation"] = "training"
    """[choice] validation: the reports are validation losses instead."""


@dataclass(frozen=True)
class Report:
    """A trial's loss at a step, in nats per label token."""

    step: int
    loss: float


def hopeless_reason(own: Sequence[Report], others: Sequence[Sequence[Report]], rule: Hopeless) -> str | None:
    """Why the trial should be stopped after its last report; None if it should not. own, others: reports in step order;
    a nan loss counts as infinite."""
    if not own or own[-1].step < rule.after_steps:
        return None
    step = own[-1].step
    averages = [
        fmean(_loss(report) for report in other if report.step <= step)
        for other in others
        if other and other[-1].step >= step and other[0].step <= step
    ]
    if len(averages) < rule.trials:
        return None
    best, center = min(_loss(report) for report in own), median(averages)
    tolerance = (rule.factor - 1) * abs(center) if rule.factor != 1 else 0.0
    if not best > center + tolerance:
        return None
    more = f" by more than {tolerance:.4f} (factor {rule.factor:g})" if tolerance else ""
    return (
        f"its best {rule.loss} loss by step {step}, {best:.4f}, is{more} above {center:.4f}, the median of the "
        f"running averages of {len(averages)} trials there"
    )


def _loss(report: Report) -> float:
    return math.inf if math.isnan(report.loss) else report.loss
