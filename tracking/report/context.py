"""What the measures of a report are computed from: a run, its baseline, and whether the two are comparable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tracking.compare.measures import median
from tracking.report.finding import TITLES, WIDE, Finding, Limit, Verdict
from tracking.report.sessions import RunHistory
from tracking.run_facts import RunFacts
from tracking.summary import setting


@dataclass(frozen=True)
class Run:
    """A run read from its folder. facts: with config and environment."""

    facts: RunFacts
    history: RunHistory

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.facts.label

    @cached_property
    def tokens_per_second(self) -> float:
        """Median over the surviving steps, all ranks together; nan without a step."""
        return median(self.facts.columns.tokens_per_second)

    @property
    def epoch_tokens(self) -> int | None:
        """Tokens of the training set that are part of a full sequence; None where that was not recorded."""
        return (self.facts.environment.get("data") or {}).get("train_tokens")

    @property
    def device(self) -> str:
        """Name of the accelerator, or cpu."""
        return str((self.facts.environment.get("accelerator") or {}).get("device", "unknown"))

    @property
    def low_precision(self) -> str | None:
        """The dtype below FP32 that matmuls are configured to compute in; None for an FP32 run."""
        dtypes = [self.facts.start.get("compute"), *(self.facts.start.get("regions") or {}).values()]
        return next((dtype for dtype in dtypes if dtype and dtype not in WIDE), None)

    def setting(self, dotted: str) -> Any:
        """A value of the resolved config; None when it is not there."""
        return setting(self.facts.config, dotted)


@dataclass(frozen=True)
class MeasureContext:
    """A run, and all that its measures are compared with.

    price: money per device and hour; None leaves costs out. peak: FLOP/s of one device; None uses the data sheet's.
    now: seconds since the epoch.
    """

    run: Run
    baseline: Run | None
    limits: Mapping[str, Limit]
    price: float | None
    peak: float | None
    now: float


def measured(context: MeasureContext, key: str, value: float, shown: str, how: str, why: str = "") -> Finding:
    """A measure that has a value. why: the reason shown when it fails."""
    if context.limits[key].allows(value):
        return _finding(context, key, value, shown, "pass", how, "")
    return _finding(context, key, value, shown, "fail", how, why)


def not_measured(context: MeasureContext, key: str, reason: str, how: str, shown: str = "") -> Finding:
    """A measure that has no verdict, and why. shown: what is known of it all the same."""
    return _finding(context, key, None, shown, "not measured", how, reason)


def _finding(
    context: MeasureContext, key: str, value: float | None, shown: str, verdict: Verdict, how: str, reason: str
) -> Finding:
    limit = context.limits[key]
    own = "; there is no published limit, this one was chosen by Mantissa" if limit.chosen else ""
    return Finding(key, TITLES[key], value, shown, str(limit), verdict, how + own, reason)


def baseline_mismatch(context: MeasureContext, *, same: tuple[str, ...]) -> str:
    """Why the baseline is missing or not comparable with the run; empty when it is comparable."""
    if context.baseline is None:
        return "no baseline; give one with --baseline"
    for what in same:
        mine, its = _COMPARED[what](context.run), _COMPARED[what](context.baseline)
        if mine is not None and its is not None and mine != its:
            return f"{context.baseline.name} has a different {what}: {its}, not {mine}"
    return ""


_COMPARED: dict[str, Callable[[Run], Any]] = {
    "number of parameters": lambda run: run.facts.start.get("parameters"),
    "training set": lambda run: (run.facts.environment.get("data") or {}).get("fingerprint"),
    "sequence length": lambda run: run.setting("data.sequence_length"),
    "micro-batch": lambda run: run.setting("batch.micro_size"),
    "number of processes": lambda run: run.facts.world_size,
    "device": lambda run: run.facts.environment.get("accelerator") and run.device,
}
SAME_SPEED = ("number of parameters", "sequence length", "number of processes", "device")
SAME_MEMORY = (*SAME_SPEED, "micro-batch")
SAME_DATA = ("training set", "sequence length")
