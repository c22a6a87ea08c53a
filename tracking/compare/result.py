"""A whole comparison, ready to be shown or written: computed once, by every window the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tracking.compare.cause import beyond_cause, cause
from tracking.compare.differences import Difference, caveats, differences
from tracking.compare.divergence import Parting, Tolerance, part
from tracking.compare.measures import Measure, measures, verdicts
from tracking.environment import redact
from tracking.run_facts import RunFacts


@dataclass(frozen=True)
class Pair:
    """One run against the baseline, in words."""

    run: RunFacts
    parting: Parting
    headline: str
    cause: str
    beyond_cause: str


@dataclass(frozen=True)
class Comparison:
    """runs: the baseline first. caveats: why it is not apples to apples; none when it is."""

    runs: Sequence[RunFacts]
    caveats: list[str]
    differences: list[Difference]
    pairs: list[Pair]
    measures: list[Measure]
    verdicts: list[str]

    @property
    def within_tolerance(self) -> bool:
        """Whether every run stays within the tolerance of the baseline, over the steps both have."""
        return all(pair.parting.beyond is None and pair.parting.first_step is not None for pair in self.pairs)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON; floats that are not finite stay floats."""
        return {
            "runs": [_run(run) for run in self.runs],
            "apples_to_apples": not self.caveats,
            "caveats": self.caveats,
            "differences": [asdict(item) for item in self.differences],
            "partings": [_pair(pair) for pair in self.pairs],
            "measures": [asdict(row) | {"best": row.best} for row in self.measures],
            "verdicts": self.verdicts,
        }


def compare(runs: Sequence[RunFacts], *, tolerance: Tolerance, price: float | None) -> Comparison:
    """Compare `runs`, the first being the baseline. price: money per device and hour; None leaves costs out."""
    found = differences(runs)
    pairs = []
    for run in runs[1:]:
        parting = part(runs[0], run, tolerance)
        why = cause(parting, differences([runs[0], run]))
        pairs.append(Pair(run, parting, headline(parting), why, beyond_cause(parting)))
    rows = measures(runs, price=price)
    return Comparison(runs, caveats(runs, found), found, pairs, rows, verdicts(runs, rows))


def headline(parting: Parting) -> str:
    """Where the run parts from the baseline: bit by bit, then beyond the tolerance."""
    if parting.first_step is None:
        return "no step in common"
    of = len(parting.baseline.columns), len(parting.run.columns)
    sparse = f" (of {parting.common} steps that both have)" if parting.common < min(of) or _has_holes(parting) else ""
    if parting.step is None:
        return f"identical to step {parting.last_step}, the last that both have{sparse}"
    same = "" if parting.identical_to is None else f"identical to step {parting.identical_to}, "
    names = ", ".join(_WORDS[name] for name, step in parting.firsts.items() if step == parting.step)
    text = f"{same}part at step {parting.step} ({names}){sparse}"
    allowed = f"{parting.tolerance.relative:.3%}".rstrip("0%").rstrip(".") + " %"
    if parting.tolerance.absolute:
        allowed += f" or {parting.tolerance.absolute:g} nats"
    if parting.beyond is not None:
        text += f"; losses are more than {allowed} apart from step {parting.beyond} on"
    else:
        text += f"; losses stay within {allowed}"
    if not math.isnan(parting.largest_gap):
        text += f", at most {parting.largest_gap:.3g} nats (step {parting.largest_gap_step})"
    return text


def _has_holes(parting: Parting) -> bool:
    first, last = parting.first_step, parting.last_step
    return first is not None and last is not None and parting.common < last - first + 1


_WORDS = {
    "order": "sample ids",
    "tokens": "tokens",
    "applied": "skipped",
    "lr": "learning rate",
    "loss_scale": "loss scale",
    "loss": "loss",
    "grad_norm": "gradient norm",
}


def _run(run: RunFacts) -> dict[str, Any]:
    return {
        "label": run.label,
        "source": run.source,
        "status": run.status,
        "world_size": run.world_size,
        "steps": len(run.columns),
        "events": dict(run.counts),
        "config": redact("", run.config),
    }


def _pair(pair: Pair) -> dict[str, Any]:
    parting = pair.parting
    return {
        "baseline": parting.baseline.label,
        "run": pair.run.label,
        "headline": pair.headline,
        "cause": pair.cause,
        "identical_to": parting.identical_to,
        "step": parting.step,
        "firsts": parting.firsts,
        "beyond_tolerance_at": parting.beyond,
        "beyond_cause": pair.beyond_cause,
        "tolerance": asdict(parting.tolerance),
        "largest_gap": parting.largest_gap,
        "largest_gap_step": parting.largest_gap_step,
        "near": parting.near,
        "events": [{"run": label, **redact("", event)} for label, event in parting.events],
    }
