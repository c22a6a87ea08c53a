"""The plot of a run: loss or reward, gradient norm, learning rate, loss scale or speed, and the metrics of its task."""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from config.errors import UserError
from config.files import write_atomically
from config.printable import shown
from tracking.figures import FIGURES, Figure
from tracking.numbers import human, number, rate
from tracking.run_facts import Columns, RunFacts, median

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

# Hide matplotlib's messages about an unwritable HOME and about fonts, which have nothing to do with the run.
logging.getLogger("matplotlib").addFilter(
    lambda record: not record.getMessage().startswith(("mkdir -p failed", "Matplotlib created a temporary"))
)
logging.getLogger("matplotlib.font_manager").addFilter(lambda record: record.levelno > logging.WARNING)

_INK, _FAINT, _ACCENT, _ALARM = "#1f4e79", "#a9c1d9", "#d1660f", "#c00000"
_SMOOTH_FROM = 100  # minimum number of steps for a running median over the raw curve
_MANY_SKIPS = 200  # maximum number of marks; more would hide the curves
_STYLE: dict[Any, Any] = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 11,
}


def plot_run(facts: RunFacts, png: Path) -> Path:
    """Draw a run to `png` (1560 x 975 pixels, plus 455 per two charts of metrics); returns it.

    Non-finite values are gaps; skipped steps, up to 200, are red lines. Raises UserError if there is no step to draw.
    """
    columns, start = facts.columns, facts.start
    if not len(columns) or not start:
        raise UserError(f"{facts.source}: no step has been recorded, so there is nothing to draw")
    recorded = list(dict.fromkeys([*columns.metrics, *facts.evaluated]))
    charts = [(figure, names) for figure in FIGURES if (names := figure.of(recorded))]
    leading = [chart for chart in charts if facts.headline in chart[1]]
    charts = [chart for chart in charts if chart not in leading]
    rows = 2 + (len(charts) + 1) // 2
    name = facts.label if facts.events is None else facts.events.resolve().parent.name
    title = (
        f"{name}: {human(start['parameters'])} parameters, {str(start['compute']).upper()} compute, "
        f"ZeRO-{start['zero_stage']}, {facts.world_size} process{'' if facts.world_size == 1 else 'es'}, "
        f"{human(columns.tokens[-1])} tokens"
    )
    with figure(png, 12, 0.5 + 3.5 * rows) as drawn:
        axes = drawn.subplots(rows, 2, sharex=True)
        drawn.suptitle(plain(title), fontsize=14)
        _draw_metrics(axes[0][0], facts, *leading[0]) if leading else _draw_loss(axes[0][0], facts)
        _draw_grad_norm(axes[0][1], columns)
        _draw_from_zero(axes[1][0], columns, "lr", "Learning rate")
        axes[1][0].yaxis.set_major_formatter(lambda value, _: rate(value))
        if start["compute"] == "fp16":
            _draw_scale(axes[1][1], columns)
        else:
            _draw_from_zero(axes[1][1], columns, "tokens_per_second", "Speed (tokens per second)")
        for axis, chart in zip(axes[2:].flat, charts, strict=False):
            _draw_metrics(axis, facts, *chart)
        for axis in axes[-1][1:] if len(charts) % 2 else ():
            axis.set_visible(False)
            axes[-2][1].tick_params(labelbottom=True)
            axes[-2][1].set_xlabel("optimizer step")
        for axis in axes[-1]:
            axis.set_xlabel("optimizer step")
            integer_steps(axis)
        if len(columns) == 1:
            axes[0][0].set_xlim(columns.step[0] - 1, columns.step[0] + 1)
    return png


def integer_steps(axis: Axes) -> None:
    """Place ticks of the x axis at whole steps."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


@contextmanager
def figure(png: Path, width: float, height: float, *, dpi: int = 130, **style: Any) -> Iterator[Picture]:
    """Context manager: a figure (width, height in inches) that is written atomically at exit; missing folders are made.

    style: matplotlib rcParams that override the common style, with `_` for `.`.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE | {name.replace("_", "."): value for name, value in style.items()}):
        drawn, content = Figure(figsize=(width, height), dpi=dpi, layout="constrained"), io.BytesIO()
        yield drawn
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a run may have a Chinese name
            FigureCanvasAgg(drawn).print_png(content)  # `savefig` would draw twice, first for the layout
    png.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(png, content.getvalue())


def plain(value: object) -> str:
    """Any value as one line of text for a figure, with `$` escaped so that it does not start mathtext."""
    return shown(value).replace("$", r"\$")


def _finite(values: np.ndarray) -> np.ndarray:
    """The values with non-finite ones replaced by nan, which leaves a gap in the curve."""
    return np.where(np.isfinite(values), values, math.nan)


def _curve(axis: Axes, x: np.ndarray, values: np.ndarray, label: str) -> None:
    """Draw the raw curve, with a running median over it for long runs."""
    y = _finite(values)
    if len(y) < _SMOOTH_FROM:
        axis.plot(x, y, "o-" if len(y) == 1 else "-", color=_INK, linewidth=1.8, label=label)
        return
    width = max(5, len(y) // 40) | 1
    axis.plot(x, y, color=_FAINT, linewidth=0.8, label=label)
    centres = np.unique(np.linspace(0, len(y) - 1, min(1000, len(y))).round().astype(int))
    medians = [median(y[max(0, centre - width // 2) : centre + width // 2 + 1]) for centre in centres]
    axis.plot(x[centres], medians, color=_INK, linewidth=1.8, label=f"median over {width} steps")


def _finish(axis: Axes, columns: Columns, title: str, legend: Literal["", "upper right", "lower right"] = "") -> None:
    """Mark the skipped steps, and add title and legend. legend: its place; empty for none."""
    skipped = columns.step[~columns.applied]
    for index, step in enumerate(skipped[:_MANY_SKIPS]):
        label = f"skipped ({len(skipped)})" if index == 0 else None
        axis.axvline(step, color=_ALARM, alpha=0.4, linewidth=1, zorder=1, label=label)
    axis.set_title(title)
    if legend:
        axis.legend(loc=legend)


def _draw_loss(axis: Axes, facts: RunFacts) -> None:
    columns = facts.columns
    _curve(axis, columns.step, columns.loss, "training")
    evaluated, _, _, losses = facts.evaluations
    if len(evaluated):
        axis.plot(evaluated, _finite(losses), "o-", color=_ACCENT, label="validation", markersize=5)
    broken = columns.step[~np.isfinite(columns.loss)][:_MANY_SKIPS]
    if len(broken):
        top = axis.get_xaxis_transform()
        axis.plot(broken, [0.97] * len(broken), "x", color=_ALARM, markersize=8, transform=top, label="not finite")
    _finish(axis, columns, f"Loss ({facts.loss_unit})" if facts.loss_unit else "Loss", "upper right")


def _draw_metrics(axis: Axes, facts: RunFacts, shown: Figure, names: list[str]) -> None:
    columns = facts.columns
    trained, validated = (columns.step, columns.metrics, "-"), (facts.evaluations[0], facts.evaluated, "o--")
    for index, name in enumerate(names):
        for x, metrics, style in (trained, validated):
            if name not in metrics:
                continue
            label, y = name if style == "-" else f"{name}, validation", _finite(metrics[name])
            axis.plot(x, y, style, color=f"C{index}", linewidth=1.0 if style == "-" else 1.6, label=plain(label))
            if shown.spread in metrics:
                low, high = y - metrics[shown.spread], y + metrics[shown.spread]
                axis.fill_between(x, low, high, color=f"C{index}", alpha=0.15, linewidth=0)
    if shown.log:
        axis.set_yscale("log")
    axis.set_title(shown.title)
    axis.legend(loc="best", fontsize=9)


def _draw_grad_norm(axis: Axes, columns: Columns) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    norms, clip = _finite(columns.grad_norm), columns.clip_coefficient
    _curve(axis, columns.step, norms, "before clipping")
    if (norms > 0).any():
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(lambda value, _: number(value))
        axis.yaxis.set_minor_formatter(NullFormatter())
    clipped = (norms * clip)[(clip > 0) & (clip < 1) & np.isfinite(norms)]  # each equals the threshold
    if len(clipped):
        label = f"clipped to {number(float(clipped[0]), 3)}"
        axis.axhline(clipped[0], color=_ACCENT, linestyle="--", linewidth=1.4, label=label)
    _finish(axis, columns, "Gradient norm (global, unscaled)", "upper right")


def _draw_scale(axis: Axes, columns: Columns) -> None:
    scales, skipped = _finite(columns.loss_scale), ~columns.applied
    axis.step(columns.step, scales, where="post", color=_INK, linewidth=1.8, label="loss scale")
    axis.set_yscale("log", base=2)
    if (scales > 0).any():
        axis.set_ylim(scales[scales > 0].min() / 2, scales[scales > 0].max() * 2)
    if skipped.sum() <= _MANY_SKIPS:
        axis.plot(columns.step[skipped], scales[skipped], "v", color=_ALARM, markersize=8)
    _finish(axis, columns, "Loss scale", "lower right")


def _draw_from_zero(axis: Axes, columns: Columns, name: str, title: str) -> None:
    _curve(axis, columns.step, getattr(columns, name), "all processes")
    axis.set_ylim(bottom=0)
    _finish(axis, columns, title)
