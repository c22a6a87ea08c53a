"""Find the step at which two runs first diverge, bitwise and beyond a tolerance, and what each recorded around it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracking.events import Event
from tracking.run_facts import RunFacts

COMPARED = {
    "order": "sample ids",
    "tokens": "tokens per step",
    "applied": "skipped steps",
    "lr": "learning rate",
    "loss_scale": "loss scale",
    "loss": "loss",
    "grad_norm": "gradient norm",
}
"""Compared columns and their display names. A step's loss is computed before its update."""

CONTEXT_STEPS = 2
"""Number of steps shown on either side of the divergence."""

_MAX_EVENTS = 400  # events kept around a step
_NOTABLE = (
    *("fault", "nonfinite", "scale", "corruption", "reexecution", "incident", "eval", "checkpoint"),
    *("run_start", "run_end", "precision"),
)


@dataclass(frozen=True)
class Tolerance:
    """Allowed difference between losses: |a - b| <= max(absolute, relative x |a|), where a is the baseline's."""

    relative: float = 0.01
    absolute: float = 0.0
    """In the unit of the loss."""


@dataclass(frozen=True)
class Divergence:
    """One run compared with the baseline over the steps that both have.

    common: number of common steps; first_step, last_step: the first and last of them, None if there are none.
    first_differences: column of COMPARED to the first step at which it differs, for columns that do. step: the earliest
    of these steps, None for identical runs. identical_to: last common step before `step`, None if there is none.
    beyond_tolerance: first step whose losses differ by more than the tolerance, or are finite in one run only.
    places: `step` and `beyond_tolerance`, where there are such.
    largest_gap: the largest |a - b| of losses, at largest_gap_step; nan if there is none.
    rows: the compared numbers around these places; events: what both runs recorded there, as
    (label, event).
    """

    baseline: RunFacts
    run: RunFacts
    tolerance: Tolerance
    common: int
    first_step: int | None
    last_step: int | None
    first_differences: dict[str, int]
    step: int | None
    identical_to: int | None
    beyond_tolerance: int | None
    places: list[int]
    largest_gap: float
    largest_gap_step: int | None
    rows: list[dict[str, Any]]
    events: list[tuple[str, Event]]


def find_divergence(baseline: RunFacts, run: RunFacts, tolerance: Tolerance) -> Divergence:
    """Compare `run` with `baseline` step by step, bit for bit."""
    a, b = baseline.columns, run.columns
    steps, left, right = np.intersect1d(a.step, b.step, assume_unique=True, return_indices=True)
    first_differences = {}
    for name in COMPARED:
        differing = np.flatnonzero(_differ(name, getattr(a, name)[left], getattr(b, name)[right]))
        if differing.size:
            first_differences[name] = int(steps[differing[0]])
    gap, outside = _gaps(a.loss[left], b.loss[right], tolerance)
    beyond = int(steps[outside[0]]) if outside.size else None
    largest = int(np.nanargmax(gap)) if np.isfinite(gap).any() else None
    step = min(first_differences.values(), default=None)
    before = steps if step is None else steps[steps < step]
    places = [place for place in dict.fromkeys((step, beyond)) if place is not None]
    return Divergence(
        baseline=baseline,
        run=run,
        tolerance=tolerance,
        common=int(steps.size),
        first_step=int(steps[0]) if steps.size else None,
        last_step=int(steps[-1]) if steps.size else None,
        first_differences=first_differences,
        step=step,
        identical_to=int(before[-1]) if before.size else None,
        beyond_tolerance=beyond,
        places=places,
        largest_gap=float(gap[largest]) if largest is not None else float("nan"),
        largest_gap_step=int(steps[largest]) if largest is not None else None,
        rows=[row for item in (baseline, run) for row in _rows(item, places)],
        events=[(item.label, event) for item in (baseline, run) for event in events_near(item, *places)],
    )


def _differ(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Mask of the values that differ. Two nans are equal; a data order that one run did not record never differs."""
    if name == "order":
        return (a != b) & (a >= 0) & (b >= 0)
    if a.dtype != np.float64:
        return a != b
    return (a != b) & ~(np.isnan(a) & np.isnan(b))


def _gaps(a: np.ndarray, b: np.ndarray, tolerance: Tolerance) -> tuple[np.ndarray, np.ndarray]:
    """(|a - b|, nan where either is not finite; indices beyond the tolerance, or where only one is finite)."""
    finite = np.isfinite(a) & np.isfinite(b)
    gap = np.full(len(a), np.nan)
    np.subtract(a, b, out=gap, where=finite)
    gap = np.abs(gap)
    allowed = np.maximum(tolerance.absolute, tolerance.relative * np.abs(np.where(finite, a, 0.0)))
    one_sided = ~finite & (np.isfinite(a) | np.isfinite(b))
    return gap, np.flatnonzero((np.nan_to_num(gap, nan=0.0) > allowed) | one_sided)


def _rows(run: RunFacts, places: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The compared numbers of a run at the steps around `places`."""
    columns, wanted = run.columns, _steps_around(places)
    for index in np.flatnonzero(np.isin(columns.step, list(wanted))):
        row: dict[str, Any] = {"run": run.label, "step": int(columns.step[index])}
        for name in ("loss", "grad_norm", "lr", "loss_scale", "step_seconds"):
            row[name] = float(getattr(columns, name)[index])
        row["applied"] = bool(columns.applied[index])
        order = int(columns.order[index])
        row["sample_ids_sha256"] = f"{order:015x}"[:10] if order >= 0 else ""  # the first ten digits
        yield row


def events_near(run: RunFacts, *places: int) -> list[Event]:
    """Notable events of `run` at the steps around `places`, in their order."""
    wanted = _steps_around(places) - {0}  # where each run starts
    near = [event for kind in _NOTABLE for event in run.rare_events.get(kind, ()) if event["step"] in wanted]
    return sorted(near, key=lambda event: event["time"])[:_MAX_EVENTS]


def _steps_around(places: Sequence[int]) -> set[int]:
    """The steps from CONTEXT_STEPS before each of `places` to CONTEXT_STEPS after it."""
    return {step for place in places for step in range(place - CONTEXT_STEPS, place + CONTEXT_STEPS + 1)}
