"""Decide which run is better, or why none is: a caveat invalidates the measure, or the difference is noise."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracking.compare.groups import Group
from tracking.compare.measures import Measure, finite, format_measure, relative_change, short_unit
from tracking.numbers import change, number, percent
from tracking.run_facts import RunFacts

_EQUAL = {"loss": 0.0005, "rate": 0.02, "bytes": 0.01, "money": 0.02}
"""Relative difference up to which two values are a tie, by kind of measure; chosen, not measured."""

_MOST_NAMED = 4
"""Maximum number of sides that a tie lists besides the best."""

MAIN_MEASURES = frozenset(
    {
        *("loss_at_equal_tokens", "loss_at_equal_time", "validation_at_equal_tokens", "validation_at_equal_time"),
        *("tokens_per_second", "memory_bytes", "skipped", "cost"),
    }
)

TOTALS = ("skipped", "nonfinite", "incidents", "abandoned", "cost")
"""Measures that grow with the number of steps."""

_AS = {"loss": "loss_at_equal_tokens", "validation": "validation_at_equal_tokens"}
"""Measure whose caveat also applies to the loss where a run ended."""


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
) -> tuple[list[Measure], list[Measure], list[str]]:
    """(measures, with `withheld` set where there is no winner; means over repeats; a sentence per main measure).

    voided: measure to the caveat that invalidates it. Losses closer than their noise, and values within _EQUAL, are
    ties. The noise of a loss is that of its own steps or that of the repeats, whichever is larger. The means have one
    value per group, and are empty without repeats.
    """
    judged, means, lines = [], [], []
    repeats = any(len(group.runs) > 1 for group in groups)
    for row in rows:
        reason = voided.get(_AS.get(row.key.partition("_where_ended_")[0], row.key), "") if row.better else ""
        line = f"{row.title}: no winner, {reason}" if reason else ""
        if row.better and not reason:
            reason, line = _judge(runs, row, groups)
        if repeats and row.kind in _EQUAL:
            if row.key in MAIN_MEASURES:
                means.append(replace(row, values=_means(row, groups), noise=(), withheld=reason))
            reason = reason or "the means of repeats are compared"
        judged.append(replace(row, withheld=reason))
        if line and (row.key in MAIN_MEASURES or "_where_ended_" in row.key):
            lines.append(line + _at_its_end(runs, row, line))
    return judged, means, lines


def _means(row: Measure, groups: Sequence[Group]) -> tuple[float, ...]:
    known = [[float(row.values[at]) for at in group.runs if finite(row.values[at])] for group in groups]
    return tuple(sum(values) / len(values) if values else math.nan for values in known)


def _at_its_end(runs: Sequence[RunFacts], row: Measure, line: str) -> str:
    """The loss of the run whose end the row is about, if the sentence does not mention it."""
    for run, value in zip(runs, row.values, strict=True):
        if row.key.endswith(f"_where_ended_{run.label}") and f"{run.label} " not in line.replace(row.title, ""):
            return f"; {run.label} {format_measure(row.kind, value)}"
    return ""


def _judge(runs: Sequence[RunFacts], row: Measure, groups: Sequence[Group]) -> tuple[str, str]:
    """(why no winner is named, or empty; sentence, or empty if there is nothing to say)."""
    alone = [Group(run.label, (index,)) for index, run in enumerate(runs)]
    sides, spread = _sides(runs, row, groups if row.kind in _EQUAL else alone)  # the mean of counts is not reported
    if len(sides) < 2:
        known = [float(value) for value in row.values if finite(value)]
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
        return "", f"{row.title}: {best.label} is best{_margin(best, second, sides, row.kind)}" if gap > 0 else ""
    equal, chance = _EQUAL[row.kind] * abs(best.value), _chance(best, second)
    if gap <= max(equal, chance):
        reason, tie = _tie(row, sides, f"{number(chance, 2)}{short_unit(runs[0])}" if 0 < gap <= chance else "")
        return reason, f"{row.title}: {tie}"
    repeats = f"; repeats are {percent(spread, 2)} apart (standard deviation)" if spread is not None else ""
    if row.kind == "loss" and all(math.isnan(side.noise) for side in sides):
        repeats = "; one run each, so its noise is unknown"
    return "", f"{row.title}: {best.label} is best{_margin(best, second, sides, row.kind)}{repeats}"


def _tie(row: Measure, sides: Sequence[_Side], noise: str) -> tuple[str, str]:
    """(why no winner is named, sentence). sides: best first. noise: its size, if it explains the difference."""
    best, equal = sides[0], _EQUAL[row.kind] * abs(sides[0].value)
    near = [side for side in sides[1:] if abs(best.value - side.value) <= max(equal, _chance(best, side))]
    named = [side.label for side in near[:_MOST_NAMED]]
    named += [f"{len(near) - _MOST_NAMED} more"] if len(near) > _MOST_NAMED else []
    ends = (best, *near) if len(near) <= _MOST_NAMED else (best, near[-1])
    texts = list(dict.fromkeys(format_measure(row.kind, side.value) for side in ends))
    if len(texts) == 1:
        return "tie", f"tie: {_joined([best.label, *named])} are equal ({texts[0]})"
    values = (", " if len(near) <= _MOST_NAMED else " to ").join(texts)
    reason = "within noise" if noise else f"within {percent(_EQUAL[row.kind])}"
    size = f"; noise {noise}" if noise and row.kind == "loss" else ""
    lowest = "lowest" if row.better == "lower" else "highest"
    return f"tie, {reason}", f"tie: {best.label} is {lowest}, {reason} of {_joined(named)} ({values}{size})"


def _joined(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _chance(best: _Side, other: _Side) -> float:
    return math.hypot(*(0.0 if math.isnan(side.noise) else side.noise for side in (best, other)))


def _sides(runs: Sequence[RunFacts], row: Measure, groups: Sequence[Group]) -> tuple[list[_Side], float | None]:
    """(sides to compare: one per group of repeats; relative standard deviation of the repeats, None without any)."""
    found: list[_Side] = []
    squares, freedom = 0.0, 0
    for group in groups:
        known = {index: float(row.values[index]) for index in group.runs if finite(row.values[index])}
        if not known:
            continue
        mean = sum(known.values()) / len(known)
        squares += sum((value - mean) ** 2 for value in known.values())
        freedom += len(known) - 1
        own = [row.noise[index] for index in known if row.noise and math.isfinite(row.noise[index])]
        noise = math.hypot(*own) / len(known) if own else math.nan
        first, *more = known
        label = f"{group.label} (mean of {len(known)})" if more else runs[first].label
        found.append(_Side(label, mean, noise, tuple(known)))
    if not freedom:
        return found, None
    deviation = math.sqrt(squares / freedom)
    # A side without repeats is assumed to be as noisy as those that have some.
    wider = [
        replace(side, noise=float(np.fmax(side.noise, 2 * deviation / math.sqrt(len(side.runs))))) for side in found
    ]
    typical = sum(side.value for side in found) / len(found)
    return wider, abs(deviation / typical) if typical else None


def _margin(best: _Side, second: _Side, sides: Sequence[_Side], kind: str) -> str:
    """The values behind a sentence, formatted as in the table: the best, and the baseline or the second best."""
    base, value = next((side for side in sides if 0 in side.runs), None), format_measure(kind, best.value)
    if base is None or base is best:
        share = "" if base is None else _percent(base, second)
        return f": {value}; {second.label} {format_measure(kind, second.value)}{share}"
    return f": {value}{_percent(base, best)}; the baseline {format_measure(kind, base.value)}"


def _percent(base: _Side, side: _Side) -> str:
    share = relative_change(base.value, side.value)
    return "" if math.isnan(share) else f" ({change(share)})"
