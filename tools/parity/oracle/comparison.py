"""A run's records, compared with the recomputed ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

START = "masters at the start"
"""The row of a run's ledger with their checksum."""


@dataclass
class Comparison:
    """One quantity over all steps."""

    what: str
    bound: float
    largest: float = 0.0
    """Relative difference; for samples and tokens 1 if they differ; for masters relative to their movement."""
    where: str = ""
    """The step, or the parameter, where it is largest."""
    made: int = 0
    """How many differences were taken into account."""

    def add(self, difference: float, where: str) -> None:
        """Take one more difference into account."""
        self.made += 1
        if not (difference <= self.largest or math.isnan(self.largest)):
            self.largest, self.where = difference, where

    @property
    def holds(self) -> bool:
        """Whether it is within its bound; nan is not."""
        return self.largest <= self.bound


def relative_difference(found: float, expected: float) -> float:
    """|found - expected| / |expected|; 0 if both are 0, nan if the run recorded no number."""
    difference = abs(found - expected)
    return difference / abs(expected) if expected else (0.0 if difference == 0 else math.inf)


def checksum_at_start(environment: Mapping[str, Any]) -> str | None:
    """The checksum that a run recorded of the masters before its first step; None without one, or for a resumed run."""
    rows = {row["what"]: row["dtype"] for row in environment.get("ledger", ())}
    line = rows.get(START, "")
    return None if not line or line.startswith("those of") else checksum_in(line)


def checksum_in(line: str) -> str:
    """The checksum in the text of a `training.engine.masters.Start`."""
    return line.rpartition("(checksum ")[2].rstrip(")")
