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


@dataclass
class Finding:
    key: str
    title: str
    value: float | None = None
    """Compared with the limit; None if not measured."""
    shown: str = ""
    """The value as text; may be set even if the value relative to the baseline is unknown."""
    limit: str = ""
    verdict: Verdict = "not measured"
    how: str = ""
    """How it was computed."""
    reason: str = ""
    """Why it fails, or why it was not measured."""


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


class NotMeasured(Exception):
    """Raised by a measure that has no value, with the reason."""


def find(measure: Callable[[MeasureContext, Finding], float], context: MeasureContext) -> Finding:
    """Compute a measure and compare it with the limit of the same name.

    measure: returns the value, and fills in `shown` and the `reason` to give if the value fails. Its docstring is the
    `how` that readers see, to which it may add.
    """
    limit, how = context.limits[measure.__name__], " ".join(str(measure.__doc__).split()).rstrip(".")
    found = Finding(measure.__name__, limit.title, limit=str(limit), how=how[0].lower() + how[1:])
    try:
        found.value = measure(context, found)
        found.verdict = "pass" if limit.allows(found.value) else "fail"
    except NotMeasured as error:
        found.reason = str(error)
    if found.verdict == "pass":
        found.reason = ""
    if limit.chosen:
        found.how += "; there is no published limit, this one was chosen by Mantissa"
    return found
