"""A panel of a heat map as plain values for a page's script (heat.js draws them)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tracking.heatmap.folding import folded
from tracking.heatmap.grid import Heat, drawn_panels, limits
from tracking.heatmap.modules import Fold, short_name
from tracking.heatmap.panels import DTYPES, PANELS
from tracking.heatmap.still import still_sentence
from tracking.heatmap.words import MUCH, changed_modules, dangers, sentences

MOST_COLUMNS = 240
_LABEL = 34  # characters of a row's name


def panels_of(heat: Heat) -> list[dict[str, Any]]:
    """Every panel that has values, with the line about it; `varies` where there is something to draw, `finding` where a
    healthy run would have another line."""
    lines = sentences(heat)
    varying = drawn_panels(heat) if lines else []
    found = outside_healthy_range(heat)
    rest = {key: {"line": line, "varies": key in varying, "finding": key in found} for key, line in lines.items()}
    return [{"key": key, "title": PANELS[key].title, **more} for key, more in rest.items()]


def outside_healthy_range(heat: Heat) -> set[str]:
    """Panels whose line is a finding; what the others say holds in a healthy run."""
    healthy = {
        "activation": lambda: not dangers(heat),
        "gradient": lambda: not changed_modules(heat, "gradient"),
        "underflow": lambda: float(np.nanmax(heat.panels["underflow"])) < MUCH,
        "drift": lambda: not np.nanmax(heat.panels["drift"]) > 0,
        "update": lambda: not changed_modules(heat, "update"),
        "lost": lambda: not still_sentence(heat),
        "nonfinite": lambda: not heat.nonfinite,
        "dtype": lambda: "; changed: " not in sentences(heat)["dtype"],
    }
    return {key for key in PANELS if heat.has(key) and not healthy[key]()} if heat else set()


def panel_data(
    heat: Heat, key: str, fold: Fold, opened: Iterable[str] = (), *, columns: int = MOST_COLUMNS
) -> dict[str, Any]:
    """One panel, without the modules that have no value in it.

    values: (rows, columns) in row order, on a logarithmic scale log10, None where nothing was measured. low, high: the
    ends of the colours on the same scale.
    """
    heat = heat.at_its_steps() if key == "nonfinite" else heat
    known = np.flatnonzero(np.isfinite(heat.panels[key]).any(axis=1)).tolist()
    used = heat.by_kind(key) if fold == "modules" else heat.chosen(known)
    shown = folded(used, fold, opened).narrowed(columns)
    values = shown.panels[key].astype(float)
    low, high = limits(shown, key)
    if PANELS[key].log:
        values = np.log10(np.where(values > 0, values, np.nan))
        low, high = math.log10(low), math.log10(high)
    return plain_panel(key, shown.rows, shown.edges, values, low, high)


def plain_panel(
    key: str,
    rows: Sequence[str],
    edges: np.ndarray,
    values: np.ndarray,
    low: float,
    high: float,
    *,
    diverging: bool = False,
) -> dict[str, Any]:
    """The object that heat.js draws. diverging: the colours have a middle, at 0."""
    panel = PANELS[key]
    return {
        "key": key,
        "title": panel.title,
        "log": panel.log,
        "percent": panel.percent,
        "diverging": diverging,
        "codes": list(DTYPES) if key == "dtype" else [],
        "rows": [short_name(name, _LABEL) for name in rows],
        "names": list(rows),
        "edges": edges.tolist(),
        "values": [[round(value, 4) if math.isfinite(value) else None for value in row] for row in values.tolist()],
        "low": low,
        "high": high,
    }


def static_heat(heat: Heat) -> list[dict[str, Any]]:
    """All panels, those that vary by kind of module and by block, for a page that is one file."""
    folds: tuple[Fold, ...] = ("kinds", "blocks")
    return [
        panel
        | {"folds": {fold: panel_data(heat, panel["key"], fold, columns=120) for fold in folds if panel["varies"]}}
        for panel in panels_of(heat)
    ]
