"""Fold the rows of a heat map: one row per block, or per kind of module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from tracking.heatmap.grid import Heat, merged
from tracking.heatmap.modules import Fold, folded_name


def folded(heat: Heat, fold: Fold, opened: Iterable[str] = ()) -> Heat:
    """Fold to one row per block, or per kind of module; modules of folds in `opened` are listed below their fold.

    A folded cell holds the largest, the sum or a mean of its modules.
    """
    if fold == "modules":
        return heat
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(heat.rows):
        groups.setdefault(folded_name(name, fold), []).append(index)
    wanted, rows, members = frozenset(opened), [], []
    for name, indices in groups.items():
        rows.append(name)
        members.append(indices)
        if name in wanted and len(indices) > 1:
            rows += [heat.rows[index] for index in indices]
            members += [[index] for index in indices]
    panels = {
        key: np.stack([merged(key, values[indices], axis=0) for indices in members])
        for key, values in heat.panels.items()
    }
    return replace(heat, rows=tuple(rows), panels=panels)
