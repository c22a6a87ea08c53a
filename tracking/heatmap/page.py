"""Heat-map panels of one run, or the difference of two, as JSON-ready values drawn by heat.js."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from tracking.heatmap.grid import Heat, drawn_panels, limits
from tracking.heatmap.modules import Fold, in_words, short_name
from tracking.heatmap.panels import DTYPES, PANELS
from tracking.heatmap.words import findings
from tracking.numbers import number

COMPARED = ("activation", "gradient", "underflow", "update")
"""Panels that can be drawn as the difference of two runs."""
MOST_COLUMNS = 240
_FEWER_COLUMNS = 120  # in a page that is one file
_LEAST = 0.05  # minimum half-range of a difference's colour scale: log10 of a ratio, or a share
_LABEL = 34  # characters of a row label


def panels_of(heat: Heat) -> list[dict[str, Any]]:
    """Every panel with values and its line of text. `varies`: whether there is something to draw; `finding`: whether
    the line reports something that a healthy run would not show."""
    found = findings(heat)
    varying = drawn_panels(heat) if found else []
    return [
        {"key": key, "title": PANELS[key].title, "line": line, "varies": key in varying, "finding": finding}
        for key, (line, finding) in found.items()
    ]


def panel_data(
    heat: Heat, key: str, fold: Fold, opened: Iterable[str] = (), *, columns: int = MOST_COLUMNS
) -> dict[str, Any]:
    """One panel, without modules that have no value in it.

    values: (rows, columns), as log10 on a logarithmic scale, None where nothing was measured. low, high: the limits of
    the colour scale, in the same units.
    """
    heat = heat.at_its_steps() if key == "nonfinite" else heat
    known = np.flatnonzero(np.isfinite(heat.panels[key]).any(axis=1)).tolist()
    used = heat.by_kind(key) if fold == "modules" else heat.chosen(known)
    shown = used.folded(fold, opened).narrowed(columns)
    values = shown.panels[key].astype(float)
    low, high = limits(shown, key)
    if PANELS[key].log:
        values = np.log10(np.where(values > 0, values, np.nan))
        low, high = math.log10(low), math.log10(high)
    return _plain_panel(shown, key, values, low, high)


def _plain_panel(heat: Heat, key: str, values: np.ndarray, low: float, high: float) -> dict[str, Any]:
    """The object that heat.js draws; `diverging` is whether its colour scale is centred at 0."""
    panel = PANELS[key]
    return {
        "key": key,
        "title": panel.title,
        "log": panel.log,
        "percent": panel.percent,
        "diverging": False,
        "codes": list(DTYPES) if key == "dtype" else [],
        "rows": [short_name(name, _LABEL) for name in heat.rows],
        "names": list(heat.rows),
        "edges": heat.edges.tolist(),
        "values": [[round(value, 4) if math.isfinite(value) else None for value in row] for row in values.tolist()],
        "low": low,
        "high": high,
    }


def static_heat(heat: Heat) -> list[dict[str, Any]]:
    """All panels, for a page that is one file; those that vary are folded by kind of module and by block."""
    folds: tuple[Fold, ...] = ("kinds", "blocks")
    found = panels_of(heat)
    for panel in found:
        drawn = folds if panel["varies"] else ()
        panel["folds"] = {fold: panel_data(heat, panel["key"], fold, columns=_FEWER_COLUMNS) for fold in drawn}
    return found


def difference_data(run: Heat, baseline: Heat, key: str, fold: Fold) -> dict[str, Any] | None:
    """A panel of a run relative to a baseline's column that covers the same step; None if they share no value.

    values: log10 of the ratio run / baseline, or the difference on a linear scale; None where either is unknown. Blue
    is lower than the baseline, red higher.
    """
    if not (run.has(key) and baseline.has(key)):
        return None
    mine, other = run.folded(fold).narrowed(_FEWER_COLUMNS), baseline.folded(fold)
    place = {name: row for row, name in enumerate(other.rows)}
    rows = [row for row, name in enumerate(mine.rows) if name in place]
    columns = np.searchsorted(other.steps, mine.steps)
    shared = columns < len(other.steps)
    ours = mine.panels[key][rows].astype(float)
    theirs = np.full(ours.shape, np.nan)
    theirs[:, shared] = other.panels[key][[place[mine.rows[row]] for row in rows]][:, columns[shared]]
    with np.errstate(all="ignore"):
        values = np.log10(ours / theirs) if PANELS[key].log else ours - theirs
    known = np.isfinite(values)
    kept = np.flatnonzero(known.any(axis=1))
    if not kept.size:
        return None
    end = max(_LEAST, float(np.quantile(np.abs(values[known]), 0.99)))
    shown = mine.chosen([rows[row] for row in kept])
    return _plain_panel(shown, key, values[kept], -end, end) | {"diverging": True}


def differences_of(run: Heat, baseline: Heat) -> list[dict[str, Any]]:
    """All compared panels, by kind of module and by block, each with a line of text, for a page that is one file."""
    found = []
    for key in COMPARED:
        folds = {fold: difference_data(run, baseline, key, fold) for fold in ("kinds", "blocks")}
        modules = difference_data(run, baseline, key, "modules")
        if modules is not None and all(folds.values()):
            found.append({"key": key, "title": PANELS[key].title, "line": _line(modules), "folds": folds})
    return found


def _line(found: dict[str, Any]) -> str:
    """Sentence naming the module that is furthest from the baseline at the last common step."""
    values = np.array([[np.nan if v is None else v for v in row] for row in found["values"]])
    column = int(np.flatnonzero(np.isfinite(values).any(axis=0))[-1])
    newest = np.nan_to_num(values[:, column])
    row = int(np.argmax(np.abs(newest)))
    far, middle = float(newest[row]), float(np.nanmedian(values[:, column]))
    where, step = in_words([found["names"][row]]), f"step {found['edges'][column + 1]:,}"
    if found["log"]:
        of_all = f"median over modules {number(10**middle, 3)} x"
        return f"furthest from the baseline at {step}: {where}, {number(10**far, 3)} x; {of_all}."
    sign = "+" if far > 0 else ""
    return f"furthest from the baseline at {step}: {where}, {sign}{number(100 * far, 2)} percentage points."
