"""Limits and verdicts of a report's measures, and their inputs: a run and a comparable baseline."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tracking.numbers import number, percent
from tracking.run_facts import RunFacts

Verdict = Literal["pass", "fail", "not measured"]


@dataclass(frozen=True)
class Limit:
    """The limit of a measure. sense: "most" is an upper limit, "least" a lower one."""

    title: str
    """Display name of the measure."""
    value: float
    sense: Literal["most", "least"]
    text: str
    """Template for the limit as text: {} is the value, {%} the value in percent."""
    chosen: bool = False
    """Whether Mantissa chose the value because there is no published one."""

    def allows(self, value: float) -> bool:
        """Whether `value` is within the limit; False for nan."""
        slack = 1e-9 * max(1.0, abs(self.value))
        return value <= self.value + slack if self.sense == "most" else value >= self.value - slack

    def __str__(self) -> str:
        return self.text.replace("{%}", percent(self.value)).replace("{}", number(self.value))


LIMITS = {
    "epoch_time": Limit("time per epoch", 0.7, "most", "at most {}x the baseline's"),
    "utilisation": Limit("device utilisation", 0.3, "least", "at least {%} of the peak", chosen=True),
    "peak_memory": Limit("peak memory", 0.7, "most", "at most {}x the baseline's"),
    "nonfinite": Limit("non-finite steps", 0.0, "most", "at most {}"),
    "validation_delta": Limit("validation loss", 0.005, "most", "at most {%} above the baseline's"),
    "epoch_cost": Limit("cost per epoch", 1.0, "most", "at most {}x the baseline's", chosen=True),
    "restore_success": Limit("restore success", 1.0, "least", "at least {%} of them"),
    "overflow_rate": Limit("overflow rate", 0.05, "most", "at most {%} of the steps", chosen=True),
    "norm_variance": Limit("gradient-norm variance", 1.5, "most", "at most {}x the baseline's", chosen=True),
    "job_success": Limit("job success", 1.0, "least", "healthy, finished with warnings or stopped"),
    "low_precision": Limit("low-precision FLOP share", 0.95, "least", "at least {%} of the FLOPs", chosen=True),
    "drift": Limit("drift from the masters", 0.0, "most", "at most {}", chosen=True),
}
"""Limits by measure, in report order."""


@dataclass(frozen=True)
class Finding:
    """A measure, its value and its verdict.

    value: compared with the limit; None if not measured. shown: the value as text; may be set even if the value
    relative to the baseline is unknown. how: how it was computed. reason: why it fails, or why it was not measured.
    """

    key: str
    title: str
    value: float | None
    shown: str
    limit: str
    verdict: Verdict
    how: str
    reason: str = ""


@dataclass(frozen=True)
class MeasureContext:
    """A run, and everything its measures are compared with.

    price: per device-hour; None leaves costs out. peak: FLOP/s of one device; None uses the data sheet's.
    """

    run: RunFacts
    baseline: RunFacts | None = None
    limits: Mapping[str, Limit] = field(default_factory=lambda: LIMITS)
    price: float | None = None
    peak: float | None = None


@dataclass(frozen=True)
class Measured:
    """The value of a measure. why: reason to show if it fails; other fields as in `Finding`."""

    value: float
    shown: str
    how: str
    why: str = ""


class NotMeasured(Exception):
    """A measure has no verdict. reason: why. shown: what is known nevertheless."""

    def __init__(self, reason: str, how: str, shown: str = "") -> None:
        super().__init__(reason)
        self.reason, self.how, self.shown = reason, how, shown


def find(measure: Callable[[MeasureContext], Measured], context: MeasureContext) -> Finding:
    """Compute a measure and compare it with the limit of the same name."""
    key = measure.__name__
    limit = context.limits[key]
    own = "; there is no published limit, this one was chosen by Mantissa" if limit.chosen else ""
    try:
        found = measure(context)
    except NotMeasured as error:
        how, reason = error.how + own, error.reason
        return Finding(key, limit.title, None, error.shown, str(limit), "not measured", how, reason)
    passed = limit.allows(found.value)
    verdict: Verdict = "pass" if passed else "fail"
    why = "" if passed else found.why
    return Finding(key, limit.title, found.value, found.shown, str(limit), verdict, found.how + own, why)
