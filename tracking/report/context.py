"""What the measures of a report are asked of: a run, its baseline, and what makes the two comparable."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tracking.compare.measures import median
from tracking.report.finding import TITLES, WIDE, Finding, Limit, Verdict
from tracking.report.sessions import Story
from tracking.run_facts import RunFacts


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it. facts: with config and environment."""

    facts: RunFacts
    story: Story

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.facts.label

    @cached_property
    def tokens_per_second(self) -> float:
        """Median over the surviving steps, all ranks together; nan without a step."""
        return median(self.facts.columns.tokens_per_second)

    @cached_property
    def memory_bytes(self) -> float:
        """Peak of the largest rank; nan where it was not recorded."""
        known = self.facts.columns.memory_bytes[self.facts.columns.memory_bytes > 0]
        return float(known.max()) if known.size else math.nan

    @property
    def epoch_tokens(self) -> int | None:
        """Tokens of the training set that are in a window; None where that was not recorded."""
        return (self.facts.environment.get("data") or {}).get("train_tokens")

    @property
    def device(self) -> str:
        """Name of the accelerator, or cpu."""
        return str((self.facts.environment.get("accelerator") or {}).get("device", "unknown"))

    @property
    def low_precision(self) -> str | None:
        """The dtype below FP32 that matmuls are meant to compute in; None for an FP32 run."""
        meant = [self.facts.start.get("compute"), *(self.facts.start.get("regions") or {}).values()]
        return next((dtype for dtype in meant if dtype and dtype not in WIDE), None)

    def setting(self, dotted: str) -> Any:
        """A value of the resolved config; None when it is not there."""
        value: Any = self.facts.config
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value


@dataclass(frozen=True)
class Question:
    """A run, and all that its measures are held against.

    price: money per device and hour; None leaves costs out. peak: FLOP/s of one device; None takes the data sheet's.
    now: seconds since the epoch.
    """

    run: Run
    baseline: Run | None
    limits: Mapping[str, Limit]
    price: float | None
    peak: float | None
    now: float


def found(asked: Question, key: str, value: float, shown: str, how: str, why: str = "") -> Finding:
    """A measure that has a value. why: what there is to say when it fails."""
    if asked.limits[key].holds(value):
        return _finding(asked, key, value, shown, "pass", how, "")
    return _finding(asked, key, value, shown, "fail", how, why)


def missing(asked: Question, key: str, reason: str, how: str, shown: str = "") -> Finding:
    """A measure that has no verdict, and why. shown: what can be told of it all the same."""
    return _finding(asked, key, None, shown, "not measured", how, reason)


def _finding(
    asked: Question, key: str, value: float | None, shown: str, verdict: Verdict, how: str, reason: str
) -> Finding:
    limit = asked.limits[key]
    own = "; the field names no limit, this one is Mantissa's" if limit.chosen else ""
    return Finding(key, TITLES[key], value, shown, str(limit), verdict, how + own, reason)


def unlike(asked: Question, *, same: tuple[str, ...]) -> str:
    """Why the baseline's value says nothing about the run's: it is missing, or other work. Empty when it does."""
    if asked.baseline is None:
        return "no baseline; name one with --baseline"
    for what in same:
        mine, its = _LIKENESS[what](asked.run), _LIKENESS[what](asked.baseline)
        if mine is not None and its is not None and mine != its:
            return f"{asked.baseline.name} has another {what}: {its}, not {mine}"
    return ""


_LIKENESS: dict[str, Callable[[Run], Any]] = {
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
