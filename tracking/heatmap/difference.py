"""One run's heat maps against a baseline's: the same modules, each step beside the baseline's nearest one."""

from __future__ import annotations

from typing import Any

import numpy as np

from tracking.heatmap.folding import folded
from tracking.heatmap.grid import Heat
from tracking.heatmap.modules import Fold, in_words
from tracking.heatmap.page import plain_panel
from tracking.heatmap.panels import PANELS
from tracking.numbers import number

COMPARED = ("activation", "gradient", "underflow", "update")
_COLUMNS = 120
_LEAST = 0.05  # ends of the colours at least: log10 of a ratio, or a share


def difference_data(run: Heat, baseline: Heat, key: str, fold: Fold) -> dict[str, Any] | None:
    """A panel as `page.panel_data` gives it; None where the two have nothing in common.

    values: log10 of the run's value over the baseline's, on a linear scale their difference; None where either is not
    known. Blue is lower than the baseline, red higher.
    """
    if not (run.has(key) and baseline.has(key)):
        return None
    mine, other = folded(run, fold).narrowed(_COLUMNS), folded(baseline, fold)
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
    names = [mine.rows[rows[row]] for row in kept]
    return plain_panel(key, names, mine.edges, values[kept], -end, end, diverging=True)


def differences_of(run: Heat, baseline: Heat) -> list[dict[str, Any]]:
    """All compared panels by kind of module and by block, each with a line, for a page that is one file."""
    found = []
    for key in COMPARED:
        folds = {fold: difference_data(run, baseline, key, fold) for fold in ("kinds", "blocks")}
        modules = difference_data(run, baseline, key, "modules")
        if modules is not None and all(folds.values()):
            found.append({"key": key, "title": PANELS[key].title, "line": _line(modules), "folds": folds})
    return found


def _line(found: dict[str, Any]) -> str:
    """Names the module that is furthest from the baseline at the last step both have."""
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
