"""Selection of the panels that are worth drawing, and the limits of their colour scales."""

from __future__ import annotations

import numpy as np

from tracking.heatmap.grid import Heat
from tracking.heatmap.panels import PANELS


def drawn_panels(heat: Heat) -> list[str]:
    """Panels worth drawing: those with a value, except flags that are constant everywhere."""
    return [
        key
        for key in PANELS
        if heat.has(key)
        and (key not in ("drift", "nonfinite", "dtype") or np.unique(np.nan_to_num(heat.panels[key])).size > 1)
    ]


def limits(heat: Heat, key: str) -> tuple[float, float]:
    """Lower and upper limit of a panel's colour scale; never equal, and above 0 on a logarithmic scale."""
    panel, values = PANELS[key], heat.panels[key]
    known = values[np.isfinite(values) & ((values > 0) | (not panel.log))]
    if known.size:
        low, high = float(known.min()), float(known.max())
    else:
        low, high = (1e-12, 1.0) if panel.log else (0.0, 1.0)
    if panel.low is not None:
        low = panel.low
    if panel.high is not None:
        high = panel.high if key == "dtype" or not panel.percent or panel.log else max(min(panel.high, high), 0.01)
    return (low, high) if high > low else (low, low * 2 if panel.log else low + 1.0)
