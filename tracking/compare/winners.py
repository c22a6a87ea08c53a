"""Decide which run is better, or why there is no winner: a caveat voids the measure, or the difference is noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tracking.compare.groups import Group
from tracking.compare.measures import Measure
from tracking.numbers import change, number, percent
from tracking.run_facts import RunFacts

_EQUAL = {"loss": 0.0005, "rate": 0.02, "bytes": 0.01, "money": 0.02}
"""Relative distance below which two values count as the same; chosen, not measured."""

_MAIN_MEASURES = frozenset(
    {
        *("loss_at_equal_tokens", "loss_at_equal_time", "validation_at_equal_tokens", "validation_at_equal_time"),
        *("tokens_per_second", "memory_bytes", "skipped", "cost"),
    }
)


@dataclass(frozen=True)
class _Side:
    """A run, or the mean of repeats."""

    label: str
    value: float
    noise: float
    """Two standard errors of the value; nan where unknown."""
    runs: tuple[int, ...]


def find_winners(
    runs: Sequence[RunFacts], rows: Sequence[Measure], groups: Sequence[Group], voided: Mapping[str, str]
) -> tuple[list[Measure], list[str]]:
    """The measures, with those withheld that have no winner, and a sentence for each main one.

    voided: measure to the caveat that voids it. Losses closer than their noise, and values closer than _EQUAL, have no
    winner. The noise of a loss is the larger of that of its own steps, and where there are repeats, of these.
    """
    judged, lines = [], []
    for row in rows:
        reason = voided.get(row.key, "") if row.better else ""
        line = f"{row.title}: no winner, {reason}" if reason else ""
        if row.better and not reason:
            reason, line = _judge(runs, row, groups)
        judged.append(replace(row, withheld=reason))
        if line and row.key in _MAIN_MEASURES:
            lines.append(line)
    return judged, lines


def _judge(runs: Sequence[RunFacts], row: Measure, groups: Sequence[Group]) -> tuple[str, str]:
    """(why no winner is named, or empty; the sentence, or empty where there is nothing to say)."""
    alone = [Group(run.label, (index,)) for index, run in enumerate(runs)]
    sides, spread = _sides(runs, row, groups if row.kind in _EQUAL else alone)  # counts have no mean worth naming
    if len(sides) < 2:
        known = [float(value) for value in row.values if isinstance(value, float) and math.isfinite(value)]
        if not sides or row.kind not in _EQUAL or len(known) < 2 or len(set(known)) < 2:
            return "", ""
        apart = (max(known) - min(known)) / abs(sides[0].value) if sides[0].value else math.nan
        reason = f"the runs are repeats of one another and {percent(apart, 2)} apart"
        return reason, f"{row.title}: no winner, {reason}"
    sides.sort(key=lambda side: side.value, reverse=row.better == "higher")
    best, second = sides[:2]
    gap = abs(best.value - second.value)
    if row.kind not in _EQUAL and len(groups) == 1:
        return "the runs are repeats of one another", ""
    if row.kind not in _EQUAL:
        return "", f"{row.title}: {best.label} is best{_margin(best, second, sides, runs)}" if gap > 0 else ""
    equal = _EQUAL[row.kind] * abs(best.value)
    if gap <= equal:
        reason = f"{best.label} and {second.label} are within {percent(_EQUAL[row.kind])}"
        return reason, f"{row.title}: no winner, {reason}"
    chance = math.hypot(*(0.0 if math.isnan(side.noise) else side.noise for side in (best, second)))
    if gap <= chance:
        reason = (
            f"within the noise of {number(chance, 2)} nats" if row.kind == "loss" else "within the noise of repeats"
        )
        return reason, f"{row.title}: no clear winner, {best.label} is best {reason}"
    repeats = f"; repeats are {percent(spread, 2)} apart (standard deviation)" if spread is not None else ""
    return "", f"{row.title}: {best.label} is best{_margin(best, second, sides, runs)}{repeats}"


def _sides(runs: Sequence[RunFacts], row: Measure, groups: Sequence[Group]) -> tuple[list[_Side], float | None]:
    """Compared sides (groups of repeats where there are any, else runs), and the repeats' relative deviation."""
    found: list[_Side] = []
    squares, freedom = 0.0, 0
    for group in groups:
        known = {
            index: float(value)
            for index in group.runs
            if isinstance(value := row.values[index], float) and math.isfinite(value)
        }
        if not known:
            continue
        mean = sum(known.values()) / len(known)
        squares += sum((value - mean) ** 2 for value in known.values())
        freedom += len(known) - 1
        own = [row.noise[index] for index in known if row.noise and math.isfinite(row.noise[index])]
        noise = math.hypot(*own) / len(known) if own else math.nan
        label = group.label if len(known) == 1 else f"{group.label} (mean of {len(known)})"
        if len(known) == 1:
            label = runs[next(iter(known))].label
        found.append(_Side(label, mean, noise, tuple(known)))
    if not freedom:
        return found, None
    deviation = math.sqrt(squares / freedom)
    # Without repeats of its own a side is taken to be as noisy as those that have some.
    wider = [replace(side, noise=_larger(side.noise, 2 * deviation / math.sqrt(len(side.runs)))) for side in found]
    typical = sum(side.value for side in found) / len(found)
    return wider, abs(deviation / typical) if typical else None


def _larger(a: float, b: float) -> float:
    return b if math.isnan(a) else max(a, b)


def _margin(best: _Side, second: _Side, sides: Sequence[_Side], runs: Sequence[RunFacts]) -> str:
    base = next((side for side in sides if 0 in side.runs), None)
    other, who = (second, second.label) if base is None or base is best else (base, "the baseline")
    if not math.isfinite(other.value) or other.value == 0:
        return ""
    return f", {change(best.value / other.value - 1)} relative to {who}"
