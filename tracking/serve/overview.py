"""Contents of the overview: a line for each run, or for each group of runs that differ only in their seed."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracking.compare.differences import format_value
from tracking.numbers import duration, human, loss, number, percent, scale
from tracking.serve.library import Entry
from tracking.verdict import WORDS, Verdict

WIDTH, HEIGHT = 140, 30
"""[pixels] Size of a sparkline."""
_PLACES = 60
_MOST_SETTINGS = 4
COLUMNS = {
    "name": "run",
    "verdict": "verdict",
    "step": "step",
    "loss": "loss",
    "validation": "validation",
    "speed": "tokens/s",
    "skips": "skipped",
    "scale": "loss scale",
    "warnings": "warnings",
    "incidents": "incidents",
    "changed": "changed",
}
"""Columns that the table can be sorted by, and their headings."""
_DESCENDING = frozenset({"step", "speed", "skips", "scale", "warnings", "incidents", "changed"})
_CONFIG_FIRST = ("precision.", "optimizer.", "deepspeed.", "model.", "batch.", "data.", "run.")


@dataclass(frozen=True)
class Asked:
    """Search, order and grouping that the reader asked for."""

    search: str
    """Words, all of which must occur in the run's name, verdict, hypothesis or settings."""
    sort: str
    descending: bool
    by_seed: bool

    @classmethod
    def of(cls, search: str, sort: str, group: str) -> Asked:
        """Parse a query's fields. sort: a column, with `-` before it for the opposite direction."""
        column = sort.removeprefix("-")
        column = column if column in COLUMNS else "changed"
        return cls(search.strip()[:200], column, (column in _DESCENDING) != sort.startswith("-"), group == "seed")


@dataclass(frozen=True)
class Line:
    """One line of the table. keys: of the runs it stands for."""

    keys: tuple[str, ...]
    name: str
    verdict: Verdict
    """The worst of a group."""
    cause: str
    hypothesis: str
    step: str
    done: float
    """[fraction] Share of the planned steps; 0 where unknown."""
    loss: str
    points: str
    """The sparkline, as the points of an SVG polyline."""
    band: str
    """Band from the lowest to the highest curve of a group, as the points of a polygon; empty for one run."""
    validation: str
    speed: str
    skips: str
    scale: str
    warnings: str
    incidents: tuple[tuple[str, int], ...]
    changed: str
    settings: tuple[tuple[str, str], ...]
    """First few settings that differ between the runs shown."""
    more_settings: int
    all_settings: str


@dataclass(frozen=True)
class Table:
    """The whole overview."""

    lines: list[Line]
    asked: Asked
    runs: int
    """Number of runs in the folder."""
    shown: int
    words: dict[str, int]
    """Number of runs by verdict, the worst first."""
    columns: dict[str, str]
    differing: int
    """Number of settings that differ between the runs shown."""


def table(entries: Sequence[Entry], asked: Asked, *, now: float) -> Table:
    """The overview of `entries`. now: seconds since the epoch."""
    wanted = [entry for entry in entries if _matches(entry, asked.search)]
    keys = differing(wanted)
    groups = _groups(wanted) if asked.by_seed else [[entry] for entry in wanted]
    value = _VALUES[asked.sort]
    ranked = sorted(groups, key=lambda group: _rank(value(group), descending=asked.descending))
    count = Counter(entry.verdict.word for entry in entries)
    words: dict[str, int] = {word: count[word] for word in WORDS if count[word]}
    lines = [_line(group, keys, now) for group in ranked]
    return Table(lines, asked, len(entries), len(wanted), words, COLUMNS, len(keys))


def differing(entries: Sequence[Entry]) -> list[str]:
    """Dotted keys of the settings that are not the same in all of `entries`."""
    names = dict.fromkeys(key for entry in entries for key in entry.settings)
    found = [key for key in names if len({repr(entry.settings.get(key)) for entry in entries if entry.settings}) > 1]
    place = {key: next((i for i, start in enumerate(_CONFIG_FIRST) if key.startswith(start)), 99) for key in found}
    return sorted(found, key=lambda key: place[key])


def _matches(entry: Entry, search: str) -> bool:
    if not search:
        return True
    text = f"{entry.name} {entry.verdict.text} {entry.hypothesis} " + " ".join(
        f"{k}={v}" for k, v in entry.settings.items()
    )
    return all(word in text.lower() for word in search.lower().split())


def _groups(entries: Sequence[Entry]) -> list[list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.group or entry.key, []).append(entry)
    return list(groups.values())


def _loss(entry: Entry) -> float:
    finite = [loss for _, loss in entry.skim.losses[-3:] if math.isfinite(loss)]
    return finite[-1] if finite else math.nan


def _validation(entry: Entry) -> float:
    return float(entry.skim.evals[-1]["loss"]) if entry.skim.evals else math.nan


def _scale(entry: Entry) -> float:
    return float(entry.skim.last.get("loss_scale") or math.nan)


def _speed(entry: Entry) -> float:
    return float(entry.skim.last.get("tokens_per_second") or math.nan)


def _skips(entry: Entry) -> float:
    return float(entry.skim.last.get("skipped_total") or 0)


def _mean(group: Sequence[Entry], value: Any) -> float:
    values = [found for entry in group if math.isfinite(found := value(entry))]
    return sum(values) / len(values) if values else math.nan


_VALUES: dict[str, Any] = {
    "name": lambda group: group[0].name,
    "verdict": lambda group: min(WORDS.index(entry.verdict.word) for entry in group),
    "step": lambda group: max(entry.status.step for entry in group),
    "loss": lambda group: _mean(group, _loss),
    "validation": lambda group: _mean(group, _validation),
    "speed": lambda group: _mean(group, _speed),
    "skips": lambda group: _mean(group, _skips),
    "scale": lambda group: _mean(group, _scale),
    "warnings": lambda group: sum(entry.verdict.warnings for entry in group),
    "incidents": lambda group: sum(entry.skim.counts["incident"] for entry in group),
    "changed": lambda group: max(entry.changed for entry in group),
}


def _rank(value: Any, *, descending: bool) -> tuple[bool, Any]:
    """Sort key; unknown values come last in both directions."""
    if isinstance(value, str):
        return False, [-ord(letter) for letter in value] + [1] if descending else [ord(letter) for letter in value]
    unknown = not math.isfinite(value)
    return unknown, 0.0 if unknown else -value if descending else value


def _line(group: Sequence[Entry], keys: Sequence[str], now: float) -> Line:
    first = group[0]
    skims = [entry.skim for entry in group]
    incidents: Counter[str] = Counter()
    for skim in skims:
        incidents.update({kind[9:]: n for kind, n in skim.counts.items() if kind.startswith("incident ")})
    worst = min((entry.verdict for entry in group), key=lambda verdict: WORDS.index(verdict.word))
    warnings = sum(entry.verdict.warnings for entry in group)
    seeds = sorted({str(entry.settings.get("run.seed")) for entry in group})
    own = [(key, _value(first.settings[key])) for key in keys if key in first.settings]
    if len(group) > 1:
        own = [(key, value) for key, value in own if key != "run.seed"]
    steps, planned = max(entry.status.step for entry in group), first.planned
    points, band = _sparkline([skim.losses for skim in skims])
    return Line(
        keys=tuple(entry.key for entry in group),
        name=first.name if len(group) == 1 else f"{_common([entry.name for entry in group])} ({len(group)} seeds)",
        verdict=worst,
        cause=worst.cause if len(group) == 1 else f"seeds {', '.join(seeds)}",
        hypothesis=first.hypothesis,
        step=f"{steps:,}" + (f" of {planned:,}" if planned else ""),
        done=min(1.0, steps / planned) if planned else 0.0,
        loss=_spread(group, _loss),
        points=points,
        band=band,
        validation=_spread(group, _validation),
        speed="" if math.isnan(speed := _mean(group, _speed)) else human(speed),
        skips=_skipped(group),
        scale=scale_text(_mean(group, _scale)),
        warnings=f"{warnings:,}" if warnings else "",
        incidents=tuple(sorted(incidents.items())),
        changed=f"{duration(max(0.0, now - max(entry.changed for entry in group)))} ago",
        settings=tuple((key.rpartition(".")[2], value) for key, value in own[:_MOST_SETTINGS]),
        more_settings=max(0, len(own) - _MOST_SETTINGS),
        all_settings="; ".join(f"{key} = {value}" for key, value in own),
    )


def _value(value: Any) -> str:
    text = format_value(value)
    return text if len(text) <= 40 else text[:39] + "\u2026"


def _spread(group: Sequence[Entry], value: Any) -> str:
    """The mean of a group and how far its seeds lie from it."""
    values = [found for entry in group if math.isfinite(found := value(entry))]
    if not values:
        return ""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return loss(mean)
    return f"{loss(mean)} \u00b1 {number(max(max(values) - mean, mean - min(values)), 2)}"


def _skipped(group: Sequence[Entry]) -> str:
    skipped = sum(int(_skips(entry)) for entry in group)
    steps = sum(entry.status.step for entry in group)
    return f"{skipped:,} ({percent(skipped / steps, 2)})" if skipped and steps else "0" if steps else ""


def scale_text(value: float) -> str:
    """A loss scale; empty where nothing is scaled."""
    return "" if math.isnan(value) or value == 1.0 else scale(value)


def _common(names: Sequence[str]) -> str:
    """Common prefix of the names, without a trailing separator or number."""
    return os.path.commonprefix(names).rstrip("-_.0123456789/ ") or names[0]


def _sparkline(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[str, str]:
    """Points of the mean curve, and of the band around it, in a box of WIDTH by HEIGHT."""
    usable = [
        np.array([point for point in curve if math.isfinite(point[1])])
        for curve in curves
        if sum(math.isfinite(loss) for _, loss in curve) > 1
    ]
    if not usable:
        return "", ""
    last = max(curve[-1, 0] for curve in usable)
    steps = np.linspace(min(curve[0, 0] for curve in usable), last, _PLACES)
    values = np.stack([np.interp(steps, curve[:, 0], curve[:, 1], right=np.nan) for curve in usable])
    known = np.isfinite(values).any(axis=0)
    steps, values = steps[known], values[:, known]
    # A first loss far above all others would flatten the curve.
    low, high = float(np.nanmin(values)), float(np.nanquantile(values, 0.97))
    across = (steps - steps[0]) / max(1.0, steps[-1] - steps[0]) * (WIDTH - 4) + 2

    def points(heights: np.ndarray, reverse: bool = False) -> str:
        down = np.clip((high - heights) / max(high - low, 1e-12), 0, 1) * (HEIGHT - 6) + 3
        pairs = [f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True)]
        return " ".join(reversed(pairs) if reverse else pairs)

    mean = np.nanmean(values, axis=0)
    if len(usable) == 1:
        return points(mean), ""
    return points(mean), f"{points(np.nanmin(values, axis=0))} {points(np.nanmax(values, axis=0), reverse=True)}"
