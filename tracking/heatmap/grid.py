"""Collect a run's events into (modules, steps) arrays, from which the heat maps are drawn.

The last attempt at a step counts, as in `tracking.compare.surviving`. Memory is bounded: beyond MOST_COLUMNS measured
steps, neighbouring steps share a column, merged by the rule of their panel.
"""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from tracking.events import Event, restored_step
from tracking.heatmap.modules import Fold, folded_name
from tracking.heatmap.panels import DTYPES, PANELS, RANGES
from tracking.jsonl import Follower

MOST_COLUMNS = 600
_MOST_CHANGES = 20_000  # maximum number of non-finite findings, and of dtype changes
USED = ("run_start", "telemetry", "nonfinite", "incident", "note")
"""Kinds of events that the collector uses."""
_MEASURED = ("activation", "gradient", "underflow", "drift", "update", "lost")


@dataclass(frozen=True)
class Heat:
    """Panels of shape (rows, columns), float32, nan where nothing was measured.

    rows: modules in forward order. edges: (columns + 1,) steps; column j holds measurements after step edges[j] up to
    and including step edges[j + 1]. computes: all dtypes in force in some module at some step.
    """

    rows: tuple[str, ...]
    edges: np.ndarray
    panels: dict[str, np.ndarray]
    computes: tuple[str, ...]
    measured: int
    """Number of telemetry events in the surviving history."""
    nonfinite: tuple[tuple[int, str, float], ...] = ()
    """(step, module, number of values) of non-finite tensors, in file order."""
    drift: tuple[int, float] = (0, 0.0)
    """(number of telemetry events, over all attempts, with a distance of 16-bit weights from masters; the largest)."""

    @property
    def steps(self) -> np.ndarray:
        """The last step of each column, shape (columns,)."""
        return self.edges[1:]

    def __bool__(self) -> bool:
        """Whether there are any rows and columns to draw."""
        return bool(self.rows) and len(self.edges) > 1

    def has(self, panel: str) -> bool:
        """Whether the panel has any finite value."""
        return panel in self.panels and bool(np.isfinite(self.panels[panel]).any())

    def chosen(self, rows: Sequence[int]) -> Self:
        """Select `rows`, in this order."""
        panels = {key: values[list(rows)] for key, values in self.panels.items()}
        return replace(self, rows=tuple(self.rows[row] for row in rows), panels=panels)

    def by_kind(self, panel: str) -> Self:
        """Order modules by kind, then block, without those that have no value in `panel`."""
        first: dict[str, int] = {}
        for index, name in enumerate(self.rows):
            first.setdefault(folded_name(name, "kinds"), index)
        known = np.flatnonzero(np.isfinite(self.panels[panel]).any(axis=1))
        return self.chosen(sorted(known.tolist(), key=lambda row: (first[folded_name(self.rows[row], "kinds")], row)))

    def folded(self, fold: Fold, opened: Iterable[str] = ()) -> Self:
        """Fold to one row per block or kind of module; each fold in `opened` is followed by rows for its modules.

        A folded cell holds the maximum, sum or mean of its modules, as its panel says.
        """
        if fold == "modules":
            return self
        groups: dict[str, list[int]] = {}
        for index, name in enumerate(self.rows):
            groups.setdefault(folded_name(name, fold), []).append(index)
        wanted, members = frozenset(opened), list[tuple[str, list[int]]]()
        for name, indices in groups.items():
            members.append((name, indices))
            if name in wanted and len(indices) > 1:
                members += [(self.rows[index], [index]) for index in indices]
        panels = {
            key: np.stack([merged(key, values[indices], axis=0) for _, indices in members])
            for key, values in self.panels.items()
        }
        return replace(self, rows=tuple(name for name, _ in members), panels=panels)

    def at_its_steps(self) -> Self:
        """The non-finite panel with a single-step column for each finding, and columns for the gaps in between."""
        first, last = int(self.edges[0]), int(self.edges[-1])
        steps = [at for step, _, _ in self.nonfinite for at in (step - 1, step)]
        edges = np.unique([first, *steps, last])
        return replace(self, edges=edges, panels={"nonfinite": _nonfinite_grid(self.nonfinite, self.rows, edges)})

    def narrowed(self, most: int) -> Self:
        """Merge neighbouring columns until at most `most` are left."""
        count = len(self.edges) - 1
        if count <= most:
            return self
        starts = np.unique(np.linspace(0, count, most + 1).astype(int))
        spans = list(zip(starts[:-1], starts[1:], strict=True))
        panels = {
            key: np.stack([merged(key, values[:, a:b], axis=1) for a, b in spans], axis=1)
            for key, values in self.panels.items()
        }
        return replace(self, edges=self.edges[starts], panels=panels)


def drawn_panels(heat: Heat) -> list[str]:
    """Panels worth drawing: those with values, except drift, nonfinite and dtype if constant."""
    flags = {key for key in ("drift", "nonfinite", "dtype") if heat.has(key)}
    constant = {key for key in flags if np.unique(np.nan_to_num(heat.panels[key])).size == 1}
    return [key for key in PANELS if heat.has(key) and key not in constant]


def limits(heat: Heat, key: str) -> tuple[float, float]:
    """Lower and upper limit of a panel's colour scale; always distinct, and positive on a logarithmic scale."""
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


def merged(panel: str, values: np.ndarray, axis: int) -> np.ndarray:
    """Merge values along `axis` by the panel's rule, ignoring nan; nan if there is no value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about slices without a value
        match PANELS[panel].merge:
            case "largest":
                return np.nanmax(values, axis=axis)
            case "sum":
                known = np.isfinite(values).any(axis=axis)
                return np.where(known, np.nansum(values, axis=axis), np.nan).astype(np.float32)
            case "average":
                return np.nanmean(values, axis=axis)
            case _:
                logs = np.log(np.where(values > 0, values, np.nan))
                return np.exp(np.nanmean(logs, axis=axis)).astype(np.float32)


@dataclass
class _Column:
    """Measurements up to `step`: an array for each panel, with one value per row known by then."""

    step: int
    values: dict[str, np.ndarray]
    measured: int = 1


class HeatCollector:
    """Accumulates events in file order; `heat` returns the heat maps so far and may be called at any time."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._columns: list[_Column] = []
        self._share = 1  # measured steps per column
        self._seen: dict[str, tuple[list[str], np.ndarray]] = {}  # panel to the modules of its last event, their rows
        self._forward: list[str] = []
        self._nonfinite: list[tuple[int, str, float]] = []
        self._changes: list[tuple[int, dict[str, str]]] = []  # step, module to dtype from then on
        self._default = ""
        self._regions = False
        self._drift = (0, 0.0)

    def add(self, event: Event) -> None:
        """Add one event of any kind; events with values of unexpected types are ignored."""
        with suppress(TypeError, ValueError, AttributeError, OverflowError):
            self._add(event)

    def _add(self, event: Event) -> None:
        step, kind = int(event["step"]), event["event"]
        if kind == "run_start":
            self._columns = [column for column in self._columns if column.step <= step]
            regions = event.get("regions") or {}
            self._default, self._regions = str(event.get("compute") or ""), bool(regions)
            self._changes = [(at, change) for at, change in self._changes if at <= step]
            self._keep_change(step, regions)
        elif kind == "telemetry":
            self._measure(step, event)
        elif kind == "nonfinite" and event.get("tensor") != "loss" and len(self._nonfinite) < _MOST_CHANGES:
            self._nonfinite.append((step, event["module"], float(event["count"])))
        elif kind == "incident" and event.get("promoted_to"):
            self._keep_change(step, dict.fromkeys(event["modules"], str(event["promoted_to"])))
        elif kind == "incident" and event.get("rolled_back_to"):  # the checkpoint's dtypes apply again
            back = restored_step(event)
            self._changes = [(at, change) for at, change in self._changes if at <= back]
        elif kind == "note" and event.get("demoted"):
            self._keep_change(step, event["demoted"])

    def _keep_change(self, step: int, change: dict[str, str]) -> None:
        if change and len(self._changes) < _MOST_CHANGES:
            self._changes.append((step, change))

    def _measure(self, step: int, event: Event) -> None:
        while self._columns and self._columns[-1].step >= step:
            self._columns.pop()  # if steps share a column, its earlier steps are lost too
        gradients, activations, drift = (event[name] or {} for name in ("gradients", "activation_max", "drift"))
        if activations:
            self._forward = list(activations)
        measured = {
            "activation": activations,
            "gradient": {name: item.get("rms") for name, item in gradients.items()},
            "underflow": {name: item.get("below_normal") for name, item in gradients.items()},
            "update": event.get("update_ratios") or {},
            "lost": event.get("lost_updates") or {},
        }
        if drift:
            count, largest = self._drift
            self._drift = count + 1, float(np.maximum(largest, drift["maximum"]))  # nan propagates
        if "by_module" in drift:  # lists only modules whose weights differ from their rounded masters
            apart = drift["by_module"]
            measured["drift"] = {name: apart.get(name, 0.0) for name in (*gradients, *apart)}
        column = _Column(step, {panel: self._spread(panel, values) for panel, values in measured.items()})
        if self._columns and self._columns[-1].measured < self._share:
            column = self._joined([self._columns.pop(), column])
        self._columns.append(column)
        if len(self._columns) > MOST_COLUMNS:
            pairs = [self._columns[at : at + 2] for at in range(0, len(self._columns), 2)]
            self._columns = [self._joined(pair) for pair in pairs]
            self._share *= 2

    def _spread(self, panel: str, values: dict[str, Any]) -> np.ndarray:
        """Scatter values by module into an array with one entry per row."""
        keys, numbers = list(values), np.array([*values.values()], float)  # fails before a damaged event gets rows
        seen, rows = self._seen.get(panel, ([], np.zeros(0, int)))
        if keys != seen:
            rows = np.array([self._rows.setdefault(key, len(self._rows)) for key in keys], int)
            self._seen[panel] = keys, rows
        spread = np.full(len(self._rows), np.nan, np.float32)
        with np.errstate(over="ignore"):
            spread[rows] = numbers
        return spread

    def _joined(self, columns: Sequence[_Column]) -> _Column:
        values = {}
        for panel in _MEASURED:
            both = [_padded(column.values[panel], len(self._rows)) for column in columns if panel in column.values]
            if both:
                values[panel] = merged(panel, np.stack(both), axis=0)
        return _Column(columns[-1].step, values, sum(column.measured for column in columns))

    def heat(self) -> Heat:
        """The heat maps collected so far; more events may be added afterwards."""
        known = (name for name in [*self._forward, *self._rows] if name in self._rows)  # in forward order
        names = tuple(dict.fromkeys([*known, *(module for _, module, _ in self._nonfinite)]))
        order = np.array([self._rows[name] for name in names if name in self._rows], int)
        edges = self._edges()
        count = len(edges) - 1
        panels: dict[str, np.ndarray] = {}
        if self._columns:
            for panel in _MEASURED:
                grid = np.full((len(names), count), np.nan, np.float32)
                for at, column in enumerate(self._columns):
                    if panel in column.values:
                        grid[: len(order), at] = _padded(column.values[panel], len(self._rows))[order]
                panels[panel] = grid
            if "activation" in panels:
                panels["activation"] = panels["activation"] / np.float32(RANGES["fp16"])
        rows = {name: index for index, name in enumerate(names)}
        if count > 0:
            panels["nonfinite"] = _nonfinite_grid(self._nonfinite, names, edges)
            panels["dtype"] = self._dtype_grid(names, rows, edges)
        used = np.unique(panels["dtype"][np.isfinite(panels["dtype"])]) if "dtype" in panels else ()
        computes = tuple(DTYPES[int(code)] for code in used if code)
        measured = sum(column.measured for column in self._columns)
        return Heat(names, edges, panels, computes, measured, tuple(self._nonfinite), self._drift)

    def _edges(self) -> np.ndarray:
        steps = [column.step for column in self._columns]
        if not steps and not self._nonfinite:
            return np.zeros(0, int)
        if len(steps) < 2 and self._nonfinite:  # use the steps of the findings as columns
            steps = sorted({*steps, *(step for step, _, _ in self._nonfinite)})[:MOST_COLUMNS]
        first = max(0, steps[0] - (steps[1] - steps[0] if len(steps) > 1 else steps[0]))
        newest = max((step for step, _, _ in self._nonfinite), default=0)
        return np.array([first, *steps, *([newest] if newest > steps[-1] else [])], int)

    def _dtype_grid(self, names: Sequence[str], rows: dict[str, int], edges: np.ndarray) -> np.ndarray:
        """Code in DTYPES per cell. Under a manifest, modules outside all regions are FP32, like the residual stream."""
        default = "fp32" if self._regions else self._default
        code = DTYPES.index(default) if default in DTYPES else 0
        grid = np.full((len(names), len(edges) - 1), float(code) if code else np.nan, np.float32)
        for step, change in self._changes:
            start = int(np.searchsorted(edges[1:], step, side="right"))
            for module, dtype in change.items():
                if module in rows and dtype in DTYPES:
                    grid[rows[module], start:] = DTYPES.index(dtype)
        return grid


def _nonfinite_grid(found: Sequence[tuple[int, str, float]], names: Sequence[str], edges: np.ndarray) -> np.ndarray:
    """Number of non-finite values per cell, shape (rows, columns)."""
    rows, grid = {name: index for index, name in enumerate(names)}, np.zeros((len(names), len(edges) - 1), np.float32)
    for step, module, count in found:
        if module in rows:
            grid[rows[module], min(max(int(np.searchsorted(edges, step)) - 1, 0), len(edges) - 2)] += count
    return grid


def _padded(values: np.ndarray, count: int) -> np.ndarray:
    return np.pad(values, (0, count - len(values)), constant_values=np.nan) if len(values) < count else values


def read_heat(path: Path) -> Heat:
    """The heat maps of one `events.jsonl`; damaged lines are skipped. Raises UserError if it cannot be read."""
    collector = HeatCollector()
    for event in Follower(path).events(*USED, whole=True):
        collector.add(event)
    return collector.heat()
