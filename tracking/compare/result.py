"""A complete comparison, computed once for the terminal, the page and JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from config.redact import redact
from tracking.compare.cause import cause, tolerance_cause
from tracking.compare.caveats import caveats
from tracking.compare.differences import Difference, differences
from tracking.compare.divergence import COMPARED, Divergence, Tolerance, find_divergence
from tracking.compare.groups import Group, seed_groups
from tracking.compare.measures import Measure, measures, short_unit
from tracking.compare.winners import TOTALS, find_winners
from tracking.numbers import number, percent
from tracking.run_facts import RunFacts


@dataclass(frozen=True)
class Pair:
    """One run compared with the baseline. headline, cause, tolerance_cause: one sentence each."""

    run: RunFacts
    divergence: Divergence
    headline: str
    cause: str
    tolerance_cause: str


@dataclass(frozen=True)
class Comparison:
    """runs: baseline first. caveats: why the runs are not directly comparable; empty if they are.

    groups: which runs are repeats of one another. means: main measures with a value per group, if there are repeats.
    """

    runs: Sequence[RunFacts]
    caveats: list[str]
    differences: list[Difference]
    pairs: list[Pair]
    measures: list[Measure]
    means: list[Measure]
    verdicts: list[str]
    groups: list[Group]

    @property
    def within_tolerance(self) -> bool:
        """Whether every run stays within the tolerance of the baseline, over the steps both have, and none but the
        baseline ended badly."""
        found = [pair.divergence for pair in self.pairs]
        alike = all(item.beyond_tolerance is None and item.first_step is not None for item in found)
        bad = [run.verdict.tone == "bad" for run in self.runs]
        return alike and (bad[0] or not any(bad))

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON; non-finite floats are kept."""
        return {
            "runs": [
                {
                    "label": run.label,
                    "source": run.source,
                    "verdict": asdict(run.verdict),
                    "world_size": run.world_size,
                    "steps": len(run.columns),
                    "events": dict(run.counts),
                    "config": redact(run.config),
                }
                for run in self.runs
            ],
            "apples_to_apples": not self.caveats,
            "caveats": self.caveats,
            "differences": [
                {"group": item.group, "key": item.key, "values": item.values, "told": item.may_explain}
                for item in self.differences
            ],
            "partings": [_pair(pair) for pair in self.pairs],
            "measures": [asdict(row) | {"best": row.best} for row in self.measures],
            "means": [asdict(row) for row in self.means],
            "verdicts": self.verdicts,
            "groups": [{"label": group.label, "runs": group.runs} for group in self.groups],
        }


def compare(runs: Sequence[RunFacts], *, tolerance: Tolerance, price: float | None) -> Comparison:
    """Compare `runs`; the first is the baseline. price: per device-hour; None leaves costs out."""
    found = differences(runs)
    pairs = []
    for run in runs[1:]:
        divergence = find_divergence(runs[0], run, tolerance)
        why = cause(divergence, differences([runs[0], run]))
        pairs.append(Pair(run, divergence, headline(divergence), why, tolerance_cause(divergence)))
    known, groups = caveats(runs, found, [pair.divergence for pair in pairs]), seed_groups(runs)
    voided = {key: text.partition(":")[0] for text, voids in reversed(known) for key in voids}
    if len({len(run.columns) for run in runs}) > 1:
        voided = dict.fromkeys(TOTALS, "different numbers of steps") | voided
    rows, means, verdicts = find_winners(runs, measures(runs, price=price), groups, voided)
    return Comparison(runs, [text for text, _ in known], found, pairs, rows, means, verdicts, groups)


def headline(divergence: Divergence) -> str:
    """One sentence on the first difference from the baseline and the first loss beyond the tolerance."""
    if divergence.first_step is None:
        return "no step in common"
    few = min(len(divergence.baseline.columns), len(divergence.run.columns))
    gaps = divergence.last_step is not None and divergence.common < divergence.last_step - divergence.first_step + 1
    sparse = f" (of {divergence.common} steps that both have)" if divergence.common < few or gaps else ""
    if divergence.step is None:
        return f"identical to step {divergence.last_step}, the last that both have{sparse}"
    same = "" if divergence.identical_to is None else f"identical to step {divergence.identical_to}, "
    first = [COMPARED[name] for name, step in divergence.first_differences.items() if step == divergence.step]
    text = f"{same}diverge at step {divergence.step} ({', '.join(first)}){sparse}"
    allowed, unit = percent(divergence.tolerance.relative), short_unit(divergence.baseline)
    if divergence.tolerance.absolute:
        allowed += f" or {number(divergence.tolerance.absolute)}{unit}"
    if divergence.beyond_tolerance is not None:
        text += f"; losses are more than {allowed} apart from step {divergence.beyond_tolerance} on"
    else:
        text += f"; losses stay within {allowed}"
    if not math.isnan(divergence.largest_gap):
        text += f", largest gap {number(divergence.largest_gap, 3)}{unit} (step {divergence.largest_gap_step})"
    return text


def _pair(pair: Pair) -> dict[str, Any]:
    divergence = pair.divergence
    return {
        "baseline": divergence.baseline.label,
        "run": pair.run.label,
        "headline": pair.headline,
        "cause": pair.cause,
        "identical_to": divergence.identical_to,
        "step": divergence.step,
        "firsts": divergence.first_differences,
        "beyond_tolerance_at": divergence.beyond_tolerance,
        "beyond_cause": pair.tolerance_cause,
        "tolerance": asdict(divergence.tolerance),
        "largest_gap": divergence.largest_gap,
        "largest_gap_step": divergence.largest_gap_step,
        "near": divergence.rows,
        "events": [{"run": label, **redact(event)} for label, event in divergence.events],
    }
