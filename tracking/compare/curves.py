"""Downsample a run's curves to a few thousand points without losing a peak, a skip or a loss-scale change."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tracking.compare.divergence import Divergence
from tracking.compare.text import event_line
from tracking.figures import FIGURES
from tracking.run_facts import RunFacts

BUCKETS = 500
"""Number of segments whose extremes and means are kept of a long run; runs of up to twice as many steps stay whole."""

MAX_MARKS = 300
"""Maximum number of marks per kind and run on the page; more are thinned out evenly."""

_AXES = ("step", "tokens", "seconds")
_DRAWN = ("loss", "grad_norm", "lr", "loss_scale", "tokens_per_second", "memory_bytes", "data_seconds")
_EXTREMES = ("loss", "grad_norm", "tokens_per_second")
_MARKED = ("incident", "nonfinite", "fault", "scale", "checkpoint", "run_start")
_DIGITS = 7


def curve(run: RunFacts) -> dict[str, list[float | None]]:
    """Axes and drawn columns at the chosen steps; None where a value is not finite."""
    return _columns(run, _chosen(run), (*_AXES, *_DRAWN, *drawn(run.columns.metrics)))


def means(run: RunFacts) -> dict[str, list[float | None]]:
    """Axes and drawn columns averaged over BUCKETS segments, for smoothing; non-finite values are ignored."""
    return {name: _means(_column(run, name)) for name in (*_AXES, *_DRAWN, *drawn(run.columns.metrics))}


def drawn(metrics: Iterable[str]) -> list[str]:
    """The given metrics that appear in a figure, as a curve or as the band around one."""
    shown = {name for figure in FIGURES for name in (*figure.of(metrics), figure.spread)}
    return [name for name in metrics if name in shown]


def _means(values: np.ndarray) -> list[float | None]:
    """Mean of the finite values in each segment of `values`, shape (steps,); None for a segment without any."""
    if not values.size:
        return []
    edges, finite = _edges(len(values)), np.isfinite(values)
    sums = np.add.reduceat(np.where(finite, values, 0.0), edges[:-1])
    counts = np.add.reduceat(finite.astype(float), edges[:-1])
    return plain_list(np.divide(sums, counts, out=np.full(len(sums), math.nan), where=counts > 0))


def _edges(steps: int) -> np.ndarray:
    """Start index of each segment, and the end of the last; shape (segments + 1,)."""
    count = steps if steps <= 2 * BUCKETS else BUCKETS
    return np.unique(np.linspace(0, steps, count + 1).astype(int))


def _chosen(run: RunFacts) -> np.ndarray:
    """Indices of the steps to draw: all of a short run, else segment starts, extremes and loss-scale changes."""
    columns = run.columns
    steps = len(columns)
    if steps <= 2 * BUCKETS:
        return np.arange(steps)
    edges = _edges(steps)
    chosen: list[np.ndarray] = [edges[:-1], np.array([steps - 1])]
    for name in (*_EXTREMES, *(name for name in [run.headline] if name in columns.metrics)):
        values = _column(run, name)
        for low, high in pairwise(edges):
            finite = np.flatnonzero(np.isfinite(values[low:high]))
            if finite.size:
                part = values[low:high][finite]
                chosen.append(low + finite[[int(np.argmin(part)), int(np.argmax(part))]])
    changes = np.flatnonzero(np.diff(columns.loss_scale) != 0)
    chosen.append(thin_out(np.union1d(changes, changes + 1), 4 * BUCKETS))
    return np.unique(np.concatenate(chosen))


def thin_out(values: np.ndarray, most: int) -> np.ndarray:
    """At most `most` of the values, evenly spaced."""
    if len(values) <= most:
        return values
    return values[np.unique(np.linspace(0, len(values) - 1, most).astype(int))]


def _columns(run: RunFacts, chosen: np.ndarray, names: Sequence[str]) -> dict[str, list[float | None]]:
    return {name: plain_list(_column(run, name)[chosen]) for name in names}


def _column(run: RunFacts, name: str) -> np.ndarray:
    """A column or metric of the run, shape (steps,)."""
    columns = run.columns
    return np.asarray(columns.metrics[name] if name in columns.metrics else getattr(columns, name), float)


def plain_list(values: np.ndarray) -> list[float | None]:
    """Values for JSON: None if not finite, integers where possible, otherwise floats with seven significant digits."""
    return [
        None if not math.isfinite(value) else int(value) if value.is_integer() else float(f"{value:.{_DIGITS}g}")
        for value in values.tolist()
    ]


def validation(run: RunFacts) -> dict[str, list[float | None]]:
    """Evaluations: their position on every axis, loss and drawn metrics."""
    found = dict(zip((*_AXES, "loss"), run.evaluations, strict=True))
    found |= {name: run.evaluated[name] for name in drawn(run.evaluated)}
    return {name: plain_list(values) for name, values in found.items()}


def band(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """Axes, and mean, minimum and maximum of each drawn column over repeats; {} for fewer than two runs with steps.

    Covers the steps that all runs share. Values are interpolated between the means of BUCKETS segments.
    """
    known = [means(run) for run in runs if len(run.columns)]
    if len(known) < 2:
        return {}
    columns = [{name: np.array(values, float) for name, values in run.items()} for run in known]
    first = max(run["step"][0] for run in columns)
    last = min(run["step"][-1] for run in columns)
    if last < first:
        return {}
    steps = np.unique(np.linspace(first, last, min(BUCKETS, max(len(run["step"]) for run in columns))))
    found: dict[str, Any] = {name: plain_list(_over(columns, name, steps).mean(axis=0)) for name in _AXES}
    for name in [name for name in columns[0] if name not in _AXES and all(name in run for run in columns)]:
        values = _over(columns, name, steps)
        parts = (("mean", values.mean(axis=0)), ("low", values.min(axis=0)), ("high", values.max(axis=0)))
        found[name] = {part: plain_list(line) for part, line in parts}
    return found


def _over(columns: Sequence[dict[str, np.ndarray]], name: str, steps: np.ndarray) -> np.ndarray:
    """One column of every run interpolated at `steps`, shape (runs, steps); nan next to a non-finite value."""
    return np.array([np.interp(steps, run["step"], run[name]) for run in columns])


def gaps(divergence: Divergence) -> tuple[dict[str, list[float | None]], dict[str, list[float | None]]]:
    """Loss of the run relative to the baseline, in percent, over the steps both have: (the largest difference of each
    segment, the signed mean of each segment, which smoothing uses)."""
    a, b = divergence.baseline.columns, divergence.run.columns
    _, left, right = np.intersect1d(a.step, b.step, assume_unique=True, return_indices=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = 100 * (b.loss[right] - a.loss[left]) / np.abs(a.loss[left])
    share[~np.isfinite(share)] = math.nan
    edges, size = _edges(len(share)), np.nan_to_num(np.abs(share), nan=-1.0)
    chosen = np.array([low + int(np.argmax(size[low:high])) for low, high in pairwise(edges)], int)
    middle = (edges[:-1] + edges[1:] - 1) // 2
    largest = _columns(divergence.run, right[chosen], _AXES) | {"gap": plain_list(share[chosen])}
    return largest, _columns(divergence.run, right[middle], _AXES) | {"gap": _means(share)}


def marks(run: RunFacts) -> list[dict[str, Any]]:
    """Notable events, skipped steps and non-finite losses, each with its position on every axis, the loss and loss
    scale there (None if not finite), and a line of text."""
    columns = run.columns
    if not len(columns):
        return []
    found = [
        mark
        for kind in _MARKED
        for events in [run.rare_events.get(kind, [])]
        for event in (events[index] for index in thin_out(np.arange(len(events)), MAX_MARKS))
        if kind != "run_start" or event.get("resumed_from")
        for mark in [_mark(run, kind, event["step"], event_line(event))]
    ]
    skipped = thin_out(np.flatnonzero(~columns.applied), MAX_MARKS)
    found += [_mark(run, "skip", int(columns.step[index]), "skipped") for index in skipped]
    broken = thin_out(np.flatnonzero(~np.isfinite(columns.loss)), MAX_MARKS)
    return found + [_mark(run, "nan", int(columns.step[at]), f"the loss is {columns.loss[at]}") for at in broken]


def _mark(run: RunFacts, kind: str, step: int, text: str) -> dict[str, Any]:
    columns = run.columns
    index = max(0, min(len(columns) - 1, int(np.searchsorted(columns.step, step, side="right")) - 1))
    names = ("tokens", "seconds", "loss", "loss_scale", *(name for name in [run.headline] if name in columns.metrics))
    there = {name: values[0] for name, values in _columns(run, np.array([index]), names).items()}
    return {"kind": kind, "text": text[:200], "step": step, **there}
