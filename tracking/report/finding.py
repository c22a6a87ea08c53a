"""One measure of a run with its verdict, and the limits that decide the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from config.errors import UserError

WIDE = frozenset({"fp32", "fp64"})
"""Dtypes that are not low precision."""

Verdict = Literal["pass", "fail", "not measured"]


def percent(share: float, digits: int = 4) -> str:
    """A share in percent, with `digits` significant digits."""
    return f"{100 * share:.{digits}g}%"


@dataclass(frozen=True)
class Limit:
    """The limit of a measure. sense: "most" is an upper limit, "least" a lower one."""

    value: float
    sense: Literal["most", "least"]
    text: str
    """The limit as text, with {:g} for the value or {:%} for the value in percent."""
    chosen: bool = False
    """Whether the value was chosen by Mantissa, where there is no published one."""

    def allows(self, value: float) -> bool:
        """Whether `value` is within the limit. nan never is."""
        slack = 1e-9 * max(1.0, abs(self.value))
        return value <= self.value + slack if self.sense == "most" else value >= self.value - slack

    def __str__(self) -> str:
        return self.text.replace("{:%}", percent(self.value)).format(self.value)


TITLES = {
    "epoch_time": "time per epoch",
    "utilisation": "device utilisation",
    "peak_memory": "peak memory",
    "nonfinite": "non-finite steps",
    "validation_delta": "validation loss",
    "epoch_cost": "cost per epoch",
    "restore_success": "restore success",
    "overflow_rate": "overflow rate",
    "norm_variance": "gradient-norm variance",
    "job_success": "job success",
    "low_precision": "low-precision FLOP share",
    "drift": "drift from the masters",
}
"""Every measure, in the order of a report."""

LIMITS = {
    "epoch_time": Limit(0.7, "most", "at most {:g}x the baseline's"),
    "utilisation": Limit(0.3, "least", "at least {:%} of the peak", chosen=True),
    "peak_memory": Limit(0.7, "most", "at most {:g}x the baseline's"),
    "nonfinite": Limit(0.0, "most", "at most {:g}"),
    "validation_delta": Limit(0.005, "most", "at most {:%} above the baseline's"),
    "epoch_cost": Limit(1.0, "most", "at most {:g}x the baseline's", chosen=True),
    "restore_success": Limit(1.0, "least", "at least {:%} of them"),
    "overflow_rate": Limit(0.05, "most", "at most {:%} of the steps", chosen=True),
    "norm_variance": Limit(1.5, "most", "at most {:g}x the baseline's", chosen=True),
    "job_success": Limit(1.0, "least", "done, or preempted"),
    "low_precision": Limit(0.95, "least", "at least {:%} of the FLOPs", chosen=True),
    "drift": Limit(0.0, "most", "at most {:g}", chosen=True),
}
"""By measure."""


@dataclass(frozen=True)
class Finding:
    """A measure, its value and its verdict.

    value: what is compared with the limit; None where it was not measured. shown: the value for people; it may be given
    where the value relative to a baseline is not known. how: how it was computed. reason: why it fails, or why it was
    not measured.
    """

    key: str
    title: str
    value: float | None
    shown: str
    limit: str
    verdict: Verdict
    how: str
    reason: str = ""


def limits_from(arguments: Sequence[str]) -> dict[str, Limit]:
    """LIMITS with those replaced that KEY=VALUE `arguments` name. Raises UserError for an unknown key or no number."""
    limits = dict(LIMITS)
    for argument in arguments:
        key, _, text = argument.partition("=")
        try:
            old, value = limits[key], float(text)
        except KeyError as error:
            raise UserError(f"--limit {argument}: unknown measure; take one of {', '.join(LIMITS)}") from error
        except ValueError as error:
            raise UserError(f"--limit {argument}: {text!r} is not a number; example: --limit epoch_time=0.8") from error
        if math.isnan(value):
            raise UserError(f"--limit {argument}: nan is not a limit; give a number")
        limits[key] = Limit(value, old.sense, old.text)
    return limits
