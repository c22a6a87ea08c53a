"""The plot of an analysis: the exponent range of every region against the ranges of FP16 and BF16."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.analyze.proposal import pattern_of
from tracking.plots import figure, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FP16_NORMAL, FP16_SUBNORMAL, FP16_END = -14, -24, 16
"""Exponents: smallest normal and subnormal number, and the power of two just above the largest number."""
BF16_NORMAL, BF16_END = -126, 128
MOST_ROWS = 96
"""Number of regions above which the layers of one pattern share a row."""
_PANELS = (
    ("activations", "Activations", False),
    ("gradients", "Activation gradients x loss scale", True),
    ("weights", "Weights", False),
    ("weight_gradients", "Weight gradients x loss scale", True),
)
_COLOURS = {"fp8": "#2e7d32", "fp16": "#1f4e79", "bf16": "#d1660f", "fp32": "#6b6b6b"}
_BAND = "#dbe9f6"
_TAIL = 0.001


def plot_ranges(result: dict[str, Any], png: Path) -> None:
    """Draw the result of a survey to `png`.

    A thick bar goes from the 0.1% to the 99.9% quantile of the non-zero magnitudes, a thin line from the smallest to
    the largest, in powers of two. Gradients are multiplied by the loss scale, as in FP16. The colour is the
    dtype proposed. result: `spreads`, `proposal` and `kinds` of tools/analyze/survey.py.
    """
    from matplotlib.lines import Line2D

    scale = result["proposal"]["loss_scale"] or 1.0
    rows = _rows(result)
    style = {"font_size": 9, "axes_titlesize": 11, "axes_grid": False, "axes_spines_left": False}
    with figure(png, 17, 2.2 + 0.19 * len(rows), dpi=110, **style) as drawn:
        axes = drawn.subplots(1, len(_PANELS), sharey=True)
        for axis, (kind, title, scaled) in zip(axes, _PANELS, strict=True):
            _draw(axis, rows, kind, shift=math.log2(scale) if scaled else 0.0)
            axis.set_title(title)
        axes[0].set_yticks(range(len(rows)), [plain(name) for name, _, _ in rows])
        axes[0].set_ylim(len(rows) - 0.4, -0.6)
        handles = [Line2D([], [], color=colour, linewidth=5, label=name) for name, colour in _COLOURS.items()]
        drawn.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False, title="proposed dtype")
        drawn.suptitle(
            f"Exponent ranges against FP16 (blue: normal numbers, pale: subnormal, loss scale {scale:g}) and BF16 "
            f"(2^{BF16_NORMAL} to 2^{BF16_END}: dashed where in sight)",
            fontsize=12,
        )


def _rows(result: dict[str, Any]) -> list[tuple[str, str, dict[str, list[tuple[int, int, int, int]]]]]:
    """Label, dtype, and by kind the extents (lowest, 0.1%, 99.9% and highest exponent) of every spread in the row."""
    choices = result["proposal"]["choices"]
    merge = len(result["spreads"]) > MOST_ROWS
    rows: dict[tuple[str, str], dict[str, list[tuple[int, int, int, int]]]] = {}
    for name, kinds in result["spreads"].items():
        label = pattern_of(name) if merge else name
        dtype = choices[name]["compute"] if name in choices else "fp32"
        row = rows.setdefault((label, dtype), {})
        for kind, spread in kinds.items():
            if spread["counts"]:
                row.setdefault(kind, []).append(extent(spread["lowest"], spread["counts"]))
    return [(label, dtype, row) for (label, dtype), row in rows.items()]


def extent(lowest: int, counts: list[int]) -> tuple[int, int, int, int]:
    """Exponents of the lower ends of the bins that hold the smallest, the 0.1% and the 99.9% quantile, and the largest.

    counts: by power of two from 2^lowest on, without empty ends, at least one.
    """
    seen = list(accumulate(counts))
    low, high = (bisect_left(seen, share * seen[-1]) for share in (_TAIL, 1 - _TAIL))
    return lowest, lowest + low, lowest + high, lowest + len(counts) - 1


def _draw(axis: Axes, rows: list[tuple[str, str, Any]], kind: str, *, shift: float) -> None:
    axis.axvspan(FP16_NORMAL, FP16_END, color=_BAND, zorder=0, linewidth=0)
    axis.axvspan(FP16_SUBNORMAL, FP16_NORMAL, color=_BAND, alpha=0.45, zorder=0, linewidth=0)
    ends = [FP16_SUBNORMAL - 6.0, FP16_END + 3.0]
    for index, (_, dtype, row) in enumerate(rows):
        extents = row.get(kind, [])
        if not extents:
            continue
        smallest, low = min(item[0] for item in extents) + shift, min(item[1] for item in extents) + shift
        high, largest = max(item[2] for item in extents) + shift + 1, max(item[3] for item in extents) + shift + 1
        axis.plot([smallest, largest], [index, index], color=_COLOURS[dtype], linewidth=0.8, zorder=2)
        axis.plot([low, high], [index, index], color=_COLOURS[dtype], linewidth=5, solid_capstyle="butt", zorder=3)
        ends += [smallest - 1, largest + 1]
    for edge in (BF16_NORMAL, BF16_END):
        axis.axvline(edge, color=_COLOURS["bf16"], linestyle="--", linewidth=1)
    axis.set_xlim(max(min(ends), BF16_NORMAL - 26), max(ends))
    axis.set_xlabel("exponent (power of two)")
    axis.grid(axis="x", alpha=0.3)
    axis.tick_params(axis="y", length=0)
