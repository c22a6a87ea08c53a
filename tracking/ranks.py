"""Per-rank numbers of a step event: every rank's in small runs, least, median and most in large ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tracking.events import Event


@dataclass(frozen=True)
class Spread:
    """One measure over the ranks of a run."""

    least: float
    median: float
    most: float
    rank: int
    """The rank with the most."""
    all: tuple[float, ...]
    """Values by rank; empty where only the other fields were recorded."""


def spread(event: Event, measure: str) -> Spread | None:
    """`measure` (memory_bytes or work_seconds) of the `by_rank` field of a step event; None when it was not recorded.

    A run of up to 16 ranks records a list by rank, a larger one least, median, most and the rank that has the most.
    """
    value: Any = (event.get("by_rank") or {}).get(measure)
    if isinstance(value, Mapping):
        return Spread(value["least"], value["median"], value["most"], value["rank"], ())
    if isinstance(value, Sequence) and value:
        most = max(value)
        return Spread(min(value), median(value), most, value.index(most), tuple(value))
    return None
