"""A comparison as one self-contained HTML page: plain tables, and curves drawn by inlined uPlot.

The page needs neither a network nor a server.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tracking.compare.curves import band, curve, gaps, marks, means, plain_list, validation
from tracking.compare.differences import SETTINGS_FIRST, format_value
from tracking.compare.measures import Measure, format_measure, relative_change
from tracking.compare.result import Comparison
from tracking.compare.text import COLUMN_TITLES, SIDE_BY_SIDE, comparable, event_line, means_table, runs_by_value
from tracking.compare.winners import MAIN_MEASURES
from tracking.figures import FIGURES
from tracking.heatmap.page import differences_of, static_heat
from tracking.numbers import change, rate, scale
from tracking.pages.render import render
from tracking.run_facts import RunFacts

_MAX_EVENTS = 60
_MAX_SETTINGS = 60


def page(comparison: Comparison) -> str:
    labels, heats = [run.label for run in comparison.runs], [run.heat for run in comparison.runs[:2]]
    return render(
        "compare/page.html",
        **vars(comparison) | {"means": means_table(comparison) if comparison.means else None},
        title=" / ".join(labels[:3]) + (" / ..." if len(labels) > 3 else ""),
        labels=labels,
        few=len(labels) <= SIDE_BY_SIDE,
        repeats=any(len(group.runs) > 1 for group in comparison.groups),
        comparable=comparable(comparison),
        main=COLUMN_TITLES.keys() | {"verdict"},
        titles=COLUMN_TITLES,
        data=data(comparison),
        heat=differences_of(heats[1], heats[0]) if len(heats) > 1 else static_heat(heats[0]),
        heat_title=f"Layers of {labels[1]} against {labels[0]}" if len(labels) > 1 else "Layers over time",
        max_events=_MAX_EVENTS,
        sort_key=_sort_key,
        relative_change=_change,
        format_measure=format_measure,
        format_scale=scale,
        rate=rate,
        format_value=format_value,
        runs_by_value=runs_by_value,
        event_line=event_line,
    )


def data(comparison: Comparison) -> dict[str, Any]:
    """Curves, marks and divergences for the page's script, ready for JSON."""
    found = [gaps(pair.divergence) for pair in comparison.pairs]
    return {
        **_charts(comparison.runs),
        "gaps": [largest for largest, _ in found],
        "gap_means": [means for _, means in found],
        "groups": [
            {"label": group.label, "runs": group.runs, "curves": band([comparison.runs[index] for index in group.runs])}
            for group in comparison.groups
        ],
        "divergences": [
            {"run": index, "step": pair.divergence.step, "beyond": pair.divergence.beyond_tolerance}
            for index, pair in enumerate(comparison.pairs, start=1)
        ],
        "scatter": scatter(comparison),
    }


def scatter(comparison: Comparison) -> dict[str, Any]:
    """Differing settings, and measures, each with one value per run, for the page's script."""
    items = [item for item in comparison.differences if item.group != "deepspeed"]
    ranked = sorted(items, key=lambda item: (item.key not in SETTINGS_FIRST, -len(set(map(repr, item.values)))))
    rows = [row for row in comparison.measures if row.kind != "text"]
    return {
        "settings": {item.key: [_plain(value) for value in item.values] for item in ranked[:_MAX_SETTINGS]},
        "measures": [
            {
                "title": row.title,
                "values": plain_list(np.array(row.values)),
                "texts": [format_measure(row.kind, v) for v in row.values],
            }
            for row in sorted(rows, key=lambda row: row.key not in MAIN_MEASURES)
        ],
    }


def _plain(value: Any) -> float | str:
    """A setting's value on an axis: finite numbers as they are, anything else as text."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return format_value(value)[:60]


def run_data(run: RunFacts) -> dict[str, Any]:
    """Curves and marks of one run for the page's script, ready for JSON."""
    return {**_charts([run]), "gaps": [], "gap_means": [], "groups": [], "divergences": []}


def _charts(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """Everything drawn for each run, the charts of metrics, the loss's unit if all runs share it, and the headline
    metric that replaces the loss, if any."""
    drawn: list[dict[str, Any]] = [
        {
            "label": run.label,
            "verdict": run.verdict.word,
            "curve": curve(run),
            "means": means(run),
            "validation": validation(run),
            "marks": marks(run),
        }
        for run in runs
    ]
    units = {run.loss_unit for run in runs}
    metrics = list(dict.fromkeys(name for run in drawn for part in (run["curve"], run["validation"]) for name in part))
    return {
        "runs": drawn,
        "unit": units.pop() if len(units) == 1 else "",
        "headline": min(run.headline for run in runs),
        "figures": [figure._asdict() | {"names": names} for figure in FIGURES if (names := figure.of(metrics))],
    }


def _sort_key(row: Measure, index: int) -> str:
    """Sort key of a cell in the table of runs; unrecorded numbers come last."""
    value = row.values[index]
    return value if isinstance(value, str) else repr(value) if math.isfinite(value) else "1e308"


def _change(row: Measure, index: int) -> dict[str, Any] | None:
    """Relative change from the baseline's value and whether it is an improvement; None if there is nothing to show."""
    base, value = row.values[0], row.values[index]
    if not index or not row.better or row.withheld or isinstance(value, str) or isinstance(base, str):
        return None
    share = relative_change(base, value)
    if math.isnan(share):
        return None
    return {"text": change(share), "better": (value < base) == (row.better == "lower")}
