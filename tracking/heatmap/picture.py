"""The heat maps as one PNG, light or dark."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from config.errors import UserError
from tracking import plots
from tracking.heatmap.grid import Heat, drawn_panels, limits
from tracking.heatmap.modules import folded_name, short_name
from tracking.heatmap.panels import DTYPE_COLOURS, DTYPES, PANELS
from tracking.heatmap.words import sentences
from tracking.numbers import number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_LABELS = 20
_MOST_COLUMNS = 300
_TITLE = 44  # characters per line of a title, so that it does not reach the next panel
_WIDTH = 72  # characters per line of the text under a panel


def draw_heat(heat: Heat, png: Path, *, title: str) -> Path:
    """Draw every panel that varies to `png`, two per row, and return `png`. Raises UserError if there is none."""
    keys = drawn_panels(heat)
    if not keys:
        raise UserError(f"{png}: no telemetry has been recorded, so there is no heat map to draw")
    lines = sentences(heat)
    narrow = heat.narrowed(_MOST_COLUMNS)
    down = -(-len(keys) // 2)
    with plots.figure(png, 15, 4.3 * down + 0.5, dpi=104, axes_grid=False) as figure:
        axes = figure.subplots(down, 2, squeeze=False).ravel()
        figure.suptitle(plots.plain(title), fontsize=14)
        for axis, key in zip(axes, keys, strict=False):
            shown = heat.at_its_steps() if key == "nonfinite" else narrow
            _draw(figure, axis, shown.by_kind(key), key, lines.get(key, ""))
        for axis in axes[len(keys) :]:
            axis.set_axis_off()
    return png


def _draw(figure: Figure, axis: Axes, heat: Heat, key: str, line: str) -> None:
    from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm, Normalize
    from matplotlib.ticker import NullFormatter

    panel, values = PANELS[key], heat.panels[key]
    low, high = limits(heat, key)
    shown = np.ma.masked_invalid(np.where(values > 0, values, np.nan) if panel.log else values)
    norm: Any
    if key == "dtype":
        colours: Any = ListedColormap(DTYPE_COLOURS)
        norm = BoundaryNorm(np.arange(-0.5, len(DTYPES)), len(DTYPES))
    else:
        colours, low = ("Reds", low / 10) if key == "nonfinite" else ("viridis", low)  # Reds starts at white
        norm = LogNorm(low, high, clip=True) if panel.log else Normalize(low, high)
    axis.set_facecolor("#e9e9e9")
    drawn: Any
    if key == "nonfinite":  # a single cell among thousands would be invisible
        rows, columns = np.nonzero(np.nan_to_num(values))
        found = np.minimum(values[rows, columns], 1e30)
        drawn = axis.scatter(heat.steps[columns], rows + 0.5, c=found, cmap=colours, norm=norm, edgecolors="k", s=40)
        axis.set_xlim(heat.edges[0], heat.edges[-1])
        axis.set_ylim(0, len(heat.rows))
    else:
        edges = np.arange(len(heat.rows) + 1)
        drawn = axis.pcolormesh(heat.edges, edges, shown, cmap=colours, norm=norm, rasterized=True)
    axis.invert_yaxis()
    axis.set_title(textwrap.fill(panel.title, _TITLE))
    plots.integer_steps(axis)
    under = "\n".join(plots.plain(part) for part in textwrap.wrap(line, _WIDTH))
    axis.set_xlabel(under, loc="left", fontsize=10)
    places, labels, borders = row_labels(heat.rows)
    axis.set_yticks(places, [plots.plain(label) for label in labels], fontsize=8)
    for border in borders:
        axis.axhline(border, color="white", linewidth=0.6)
    bar = figure.colorbar(drawn, ax=axis, pad=0.01, aspect=20)
    if key == "dtype":
        bar.set_ticks(range(len(DTYPES)), labels=["-", *DTYPES[1:]])
    else:
        bar.ax.yaxis.set_major_formatter(lambda value, _: (percent if panel.percent else number)(value, 2))
        bar.ax.yaxis.set_minor_formatter(NullFormatter())
        bar.ax.set_ylim(bottom=limits(heat, key)[0])


def row_labels(rows: tuple[str, ...]) -> tuple[list[float], list[str], list[int]]:
    """(centre and label of each stretch of rows of one kind that has room for a label; borders between stretches)."""
    kinds = [folded_name(name, "kinds") for name in rows]
    starts = [index for index, kind in enumerate(kinds) if index == 0 or kind != kinds[index - 1]]
    ends = [*starts[1:], len(rows)]
    room = len(rows) / (1.5 * _MOST_LABELS)  # rows that a label takes up
    stretches = [(start, end) for start, end in zip(starts, ends, strict=True) if end - start >= room]
    labels = [short_name(kinds[start], 26) for start, _ in stretches]
    return [(start + end) / 2 for start, end in stretches], labels, starts[1:]
