"""The plot of a run: loss, gradient norm, learning rate, and loss scale or speed, from its events."""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.errors import UserError
from config.files import write_atomically
from config.printable import shown
from tracking.events import Event
from tracking.jsonl import read_run_events, surviving
from tracking.numbers import human, number, rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What matplotlib says of a HOME that it may not write and of its fonts is no news about the run.
logging.getLogger("matplotlib").addFilter(
    lambda record: not record.getMessage().startswith(("mkdir -p failed", "Matplotlib created a temporary"))
)
logging.getLogger("matplotlib.font_manager").addFilter(lambda record: record.levelno > logging.WARNING)

_INK, _FAINT, _ACCENT, _ALARM = "#1f4e79", "#a9c1d9", "#d1660f", "#c00000"
_SMOOTH_FROM = 100  # steps from which a running median is drawn over the raw curve
_METRICS = {
    "Accuracy and agreement": ("accuracy", "agreement", "f1", "matthews"),
    "Correlation": ("pearson",),
    "KL (nats per token)": ("kl",),
    "Rewards (beta times nats)": ("rewards/chosen", "rewards/rejected", "rewards/margin"),
    "Reward, and share of prompts without signal": ("reward/mean", "reward/no_signal"),
}
"""Metrics of tasks that are drawn, by what is in their names."""
_MANY_SKIPS = 200  # more marks would hide the curves
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


def plot_run(events: Path, png: Path) -> Path:
    """Draw the run recorded in `events` to `png` (1560 x 975 pixels, 455 more for two kinds of metrics); returns it.

    The last attempt at a step is drawn. Non-finite values are gaps, and every
    skipped step is a red line. Raises UserError when there is no step to draw.
    """
    timeline = surviving(read_run_events(events))
    steps = [event for event in timeline if event["event"] == "step"]
    starts = [event for event in timeline if event["event"] == "run_start"]
    if not steps or not starts:
        raise UserError(f"{events}: no step has been recorded, so there is nothing to draw")
    evals = [event for event in timeline if event["event"] == "eval"]
    metrics = [(title, names) for title, of in _METRICS.items() if (names := _metric_names([*steps, *evals], of))]
    rows = 2 + (len(metrics) + 1) // 2
    with figure(png, 12, 0.5 + 3.5 * rows) as drawn:
        axes = drawn.subplots(rows, 2, sharex=True)
        drawn.suptitle(plain(_title(events.resolve().parent.name, starts[-1], steps)), fontsize=14)
        _draw_loss(axes[0][0], steps, evals, starts[-1].get("loss_unit"))
        _draw_grad_norm(axes[0][1], steps)
        _draw_lr(axes[1][0], steps)
        (_draw_scale if starts[-1]["compute"] == "fp16" else _draw_speed)(axes[1][1], steps)
        for axis, (title, names) in zip(axes[2:].flat, metrics, strict=False):
            _draw_metrics(axis, steps, evals, title, names)
        for axis in axes[-1][1:] if len(metrics) % 2 else ():
            axis.set_visible(False)
            axes[-2][1].tick_params(labelbottom=True)
            axes[-2][1].set_xlabel("optimizer step")
        for axis in axes[-1]:
            axis.set_xlabel("optimizer step")
            integer_steps(axis)
        if len(steps) == 1:
            axes[0][0].set_xlim(steps[0]["step"] - 1, steps[0]["step"] + 1)
    return png


def integer_steps(axis: Axes) -> None:
    """Number the x axis at whole steps."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


@contextmanager
def figure(png: Path, width: float, height: float, *, dpi: int = 130, **style: Any) -> Iterator[Figure]:
    """A figure [inches] to draw on, written at the end: whole or not at all, with the folders above it.

    style: matplotlib's settings that differ from those of all figures, with `_` for `.`.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE | {name.replace("_", "."): value for name, value in style.items()}):
        drawn, content = Figure(figsize=(width, height), dpi=dpi, layout="constrained"), io.BytesIO()
        yield drawn
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a run's name may be Chinese
            FigureCanvasAgg(drawn).print_png(content)  # `savefig` would draw twice, first for the layout
    png.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(png, content.getvalue())


def plain(value: object) -> str:
    """Any value as text of one line in a figure, where a pair of `$` would otherwise enclose mathematics."""
    return shown(value).replace("$", r"\$")


def _title(name: str, start: Event, steps: list[Event]) -> str:
    processes = f"{start['world_size']} process{'' if start['world_size'] == 1 else 'es'}"
    compute = str(start["compute"]).upper()
    return (
        f"{name}: {human(start['parameters'])} parameters, {compute} compute, ZeRO-{start['zero_stage']}, "
        f"{processes}, {human(steps[-1]['tokens'])} tokens"
    )


def _column(events: list[Event], name: str) -> list[float]:
    """One field over the events; nan, a gap in the curve, where it was not recorded or is not finite."""
    values = (event[name] for event in events)
    return [value if value is not None and math.isfinite(value) else math.nan for value in values]


def _numbers(events: list[Event]) -> list[int]:
    return [event["step"] for event in events]


def _curve(axis: Axes, x: list[int], y: list[float], label: str) -> None:
    """The raw curve, and for long runs a running median over it."""
    if len(y) < _SMOOTH_FROM:
        axis.plot(x, y, "o-" if len(y) == 1 else "-", color=_INK, linewidth=1.8, label=label)
        return
    width = max(5, len(y) // 40) | 1
    axis.plot(x, y, color=_FAINT, linewidth=0.8, label=label)
    centres, medians = _running_median(y, width)
    axis.plot([x[c] for c in centres], medians, color=_INK, linewidth=1.8, label=f"median over {width} steps")


def _running_median(values: list[float], width: int) -> tuple[list[int], list[float]]:
    """Median of the values that are not nan in a centred window, at up to 1000 places: (their indices, medians)."""
    import numpy

    array = numpy.asarray(values)
    centres = sorted({round(place) for place in numpy.linspace(0, len(values) - 1, min(1000, len(values)))})
    windows = (array[max(0, centre - width // 2) : centre + width // 2 + 1] for centre in centres)
    known = (window[~numpy.isnan(window)] for window in windows)
    return centres, [float(numpy.median(window)) if window.size else math.nan for window in known]


def _mark_skips(axis: Axes, steps: list[Event]) -> None:
    skipped = [event["step"] for event in steps if not event["applied"]]
    for index, step in enumerate(skipped[:_MANY_SKIPS]):
        label = f"skipped ({len(skipped)})" if index == 0 else None
        axis.axvline(step, color=_ALARM, alpha=0.4, linewidth=1, zorder=1, label=label)


def _draw_loss(axis: Axes, steps: list[Event], evals: list[Event], unit: str | None) -> None:
    """unit: of `run_start`; None of a run that is older than the field."""
    _curve(axis, _numbers(steps), _column(steps, "loss"), "training")
    if evals:
        axis.plot(_numbers(evals), _column(evals, "loss"), "o-", color=_ACCENT, label="validation", markersize=5)
    if broken := [event["step"] for event in steps if not math.isfinite(event["loss"])][:_MANY_SKIPS]:
        top = axis.get_xaxis_transform()
        axis.plot(broken, [0.97] * len(broken), "x", color=_ALARM, markersize=8, transform=top, label="not finite")
    _mark_skips(axis, steps)
    if unit is None:
        per_token = not any("metrics" in event for event in steps) and all(event.get("perplexity") for event in evals)
        unit = "nats per token" if per_token else ""
    axis.set_title(f"Loss ({unit})" if unit else "Loss")
    axis.legend(loc="upper right")


def _metric_names(events: list[Event], kinds: tuple[str, ...]) -> list[str]:
    """Metrics whose name has one of `kinds` in it, in the order in which they were recorded first."""
    found = dict.fromkeys(name for event in events for name in event.get("metrics") or {})
    return [name for name in found if any(kind in name for kind in kinds)]


def _draw_metrics(axis: Axes, steps: list[Event], evals: list[Event], title: str, names: list[str]) -> None:
    for index, name in enumerate(names):
        for events, style in ((steps, "-"), (evals, "o--")):
            own = [
                {"step": event["step"], name: event["metrics"][name]}
                for event in events
                if name in (event.get("metrics") or {})
            ]
            if own:
                label = f"{name}, validation" if events is evals else name
                width, colour = 1.0 if events is steps else 1.6, f"C{index}"
                axis.plot(_numbers(own), _column(own, name), style, color=colour, linewidth=width, label=plain(label))
    axis.set_title(title)
    axis.legend(loc="best", fontsize=9)


def _draw_grad_norm(axis: Axes, steps: list[Event]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    norms = _column(steps, "grad_norm")
    _curve(axis, _numbers(steps), norms, "before clipping")
    if any(norm > 0 for norm in norms):
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(lambda value, _: number(value))
        axis.yaxis.set_minor_formatter(NullFormatter())
    clip = _clip_threshold(steps)
    if clip is not None:
        axis.axhline(clip, color=_ACCENT, linestyle="--", linewidth=1.4, label=f"clipped to {number(clip, 3)}")
    _mark_skips(axis, steps)
    axis.set_title("Gradient norm (global, unscaled)")
    axis.legend(loc="upper right")


def _clip_threshold(steps: list[Event]) -> float | None:
    """The clipping norm, from a step that was clipped: coefficient = threshold / norm."""
    for event in steps:
        norm, coefficient = event["grad_norm"], event["clip_coefficient"]
        if coefficient is not None and norm is not None and 0 < coefficient < 1 and math.isfinite(norm):
            return float(norm * coefficient)
    return None


def _draw_lr(axis: Axes, steps: list[Event]) -> None:
    axis.plot(_numbers(steps), _column(steps, "lr"), "o-" if len(steps) == 1 else "-", color=_INK, linewidth=1.8)
    _mark_skips(axis, steps)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(lambda value, _: rate(value))
    axis.set_title("Learning rate")


def _draw_scale(axis: Axes, steps: list[Event]) -> None:
    scales = _column(steps, "loss_scale")
    axis.step(_numbers(steps), scales, where="post", color=_INK, linewidth=1.8, label="loss scale")
    axis.set_yscale("log", base=2)
    known = [scale for scale in scales if scale > 0]
    if known:
        axis.set_ylim(min(known) / 2, max(known) * 2)
    overflows = [event for event in steps if not event["applied"]]
    if len(overflows) <= _MANY_SKIPS:
        axis.plot(_numbers(overflows), _column(overflows, "loss_scale"), "v", color=_ALARM, markersize=8)
    _mark_skips(axis, steps)
    axis.set_title("Loss scale")
    axis.legend(loc="lower right")


def _draw_speed(axis: Axes, steps: list[Event]) -> None:
    _curve(axis, _numbers(steps), _column(steps, "tokens_per_second"), "all processes")
    _mark_skips(axis, steps)
    axis.set_ylim(bottom=0)
    axis.set_title("Speed (tokens per second)")
    axis.legend(loc="lower right")
