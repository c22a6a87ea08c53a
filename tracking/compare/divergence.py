"""Where two runs first part, to the step: bit by bit, and beyond a tolerance; and what each recorded just there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracking.events import Event
from tracking.jsonl import decode
from tracking.run_facts import RunFacts

WATCHED = ("order", "tokens", "applied", "lr", "loss_scale", "loss", "grad_norm")
"""Columns that tell two histories apart; a step's loss is that of its batch under the weights before the step."""

NEAR = 2
"""Steps on either side of the parting that are shown."""

_MOST_NEAR_LINES = 400
_NOTABLE = ("scale", "nonfinite", "incident", "fault", "eval", "checkpoint", "run_start", "run_end", "precision")


@dataclass(frozen=True)
class Tolerance:
    """How far losses may lie apart: |a - b| <= max(absolute, relative x |a|), a the baseline's; in nats and a share."""

    relative: float = 0.01
    absolute: float = 0.0


@dataclass(frozen=True)
class Parting:
    """One run against the baseline, over the steps that both have.

    common: how many steps these are. first_step, last_step: of those; None when there is none. firsts: column of
    WATCHED to the first step at which it differs, columns that never differ left out. step: the smallest of these;
    None for identical runs. identical_to: last common step before it, None when there is none.
    beyond: first step with losses further apart than the tolerance, a loss that is finite in one run only included.
    largest_gap: the largest |a - b| of losses in nats, at largest_gap_step; nan when there is none.
    near: rows around `step`, and around `beyond`; events: what both runs recorded there, as (label, event).
    """

    baseline: RunFacts
    run: RunFacts
    tolerance: Tolerance
    common: int
    first_step: int | None
    last_step: int | None
    firsts: dict[str, int]
    step: int | None
    identical_to: int | None
    beyond: int | None
    largest_gap: float
    largest_gap_step: int | None
    near: list[dict[str, Any]]
    events: list[tuple[str, Event]]


def part(baseline: RunFacts, run: RunFacts, tolerance: Tolerance) -> Parting:
    """Hold `run` against `baseline`, step by step, exactly."""
    a, b = baseline.columns, run.columns
    steps, left, right = np.intersect1d(a.step, b.step, assume_unique=True, return_indices=True)
    firsts = {}
    for name in WATCHED:
        differing = np.flatnonzero(_differ(name, getattr(a, name)[left], getattr(b, name)[right]))
        if differing.size:
            firsts[name] = int(steps[differing[0]])
    gap, outside = _gaps(a.loss[left], b.loss[right], tolerance)
    beyond = int(steps[outside[0]]) if outside.size else None
    largest = int(np.nanargmax(gap)) if np.isfinite(gap).any() else None
    step = min(firsts.values(), default=None)
    places = [place for place in dict.fromkeys((step, beyond)) if place is not None]
    return Parting(
        baseline=baseline,
        run=run,
        tolerance=tolerance,
        common=int(steps.size),
        first_step=int(steps[0]) if steps.size else None,
        last_step=int(steps[-1]) if steps.size else None,
        firsts=firsts,
        step=step,
        identical_to=_before(steps, step),
        beyond=beyond,
        largest_gap=float(gap[largest]) if largest is not None else float("nan"),
        largest_gap_step=int(steps[largest]) if largest is not None else None,
        near=_once(row for place in places for row in _rows(baseline, run, place)),
        events=_once(
            (item.label, event) for item in (baseline, run) for place in places for event in near(item, place)
        ),
    )


def _before(steps: np.ndarray, step: int | None) -> int | None:
    """Last of `steps` before `step`; the very last without a `step`; None when there is none."""
    earlier = steps if step is None else steps[steps < step]
    return int(earlier[-1]) if earlier.size else None


def _once(items: Iterable[Any]) -> list[Any]:
    """`items` without repeats: the steps around two places may be the same ones."""
    found: list[Any] = []
    for item in items:
        if item not in found:
            found.append(item)
    return found


def _differ(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where the values are not the same; two that are nan are, and an order that one run has not recorded is."""
    if name == "order":
        return (a != b) & (a >= 0) & (b >= 0)
    if a.dtype != np.float64:
        return a != b
    return (a != b) & ~(np.isnan(a) & np.isnan(b))


def _gaps(a: np.ndarray, b: np.ndarray, tolerance: Tolerance) -> tuple[np.ndarray, np.ndarray]:
    """|a - b|, nan where one is not finite, and the indices at which it is more than the tolerance allows."""
    finite = np.isfinite(a) & np.isfinite(b)
    gap = np.full(len(a), np.nan)
    np.subtract(a, b, out=gap, where=finite)
    gap = np.abs(gap)
    allowed = np.maximum(tolerance.absolute, tolerance.relative * np.abs(np.where(finite, a, 0.0)))
    one_sided = ~finite & (np.isfinite(a) | np.isfinite(b))
    return gap, np.flatnonzero((np.nan_to_num(gap, nan=0.0) > allowed) | one_sided)


def _rows(baseline: RunFacts, run: RunFacts, place: int) -> Iterator[dict[str, Any]]:
    """The watched numbers of both runs, from NEAR steps before `place` to NEAR behind it."""
    for item in (baseline, run):
        columns = item.columns
        low, high = np.searchsorted(columns.step, (place - NEAR, place + NEAR + 1))
        for index in range(low, high):
            row: dict[str, Any] = {"run": item.label, "step": int(columns.step[index])}
            for name in ("loss", "grad_norm", "lr", "loss_scale", "step_seconds"):
                row[name] = float(getattr(columns, name)[index])
            row["applied"] = bool(columns.applied[index])
            row["sample_ids_sha256"] = order_text(int(columns.order[index]))
            yield row


def order_text(order: int) -> str:
    """The first ten digits of a batch's sample_ids_sha256; empty where it was not recorded."""
    return f"{order:015x}"[:10] if order >= 0 else ""


def near(run: RunFacts, place: int) -> list[Event]:
    """Notable events of `run` close to step `place`: read from the file again, since few are kept in memory."""
    low, high = place - NEAR, place + NEAR
    if run.events is None:
        marks = [event for kind in _NOTABLE for event in run.marks.get(kind, ()) if low <= event["step"] <= high]
        return sorted(marks, key=lambda event: (event["step"], event["time"]))
    index = int(np.searchsorted(run.columns.step, low))
    if index >= len(run.columns):
        return []
    found = []
    with run.events.open("rb") as file:
        # What a step left behind it, a resume for one, may stand before the next step's line.
        file.seek(int(run.columns.offset[max(0, index - 1)]), os.SEEK_SET)
        for _, line in zip(range(_MOST_NEAR_LINES), file, strict=False):
            event = decode(line)
            if event is None or (event["event"] == "step" and event["step"] > high):
                break
            if event["event"] in _NOTABLE and low <= event["step"] <= high:
                found.append(event)
    return found
