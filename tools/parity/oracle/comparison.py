"""A run's records, compared with the recomputed ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

START = "masters at the start"
"""The row of a run's ledger that has their checksum."""


@dataclass
class Comparison:
    """One quantity over all steps."""

    what: str
    bound: float
    largest: float = 0.0
    """Relative difference, or for samples and tokens 1 where they differ; of masters in their movement."""
    where: str = ""
    """The step, or the parameter, where it is largest."""

    def add(self, difference: float, where: str) -> None:
        """Take one more difference into account."""
        if not (difference <= self.largest or math.isnan(self.largest)):
            self.largest, self.where = difference, where

    @property
    def holds(self) -> bool:
        """Whether it is within its bound; what is not a number is not."""
        return self.largest <= self.bound


def relative_difference(found: float, expected: float) -> float:
    """|found - expected| / |expected|; 0 where both are 0, nan where the run recorded no number."""
    difference = abs(found - expected)
    return difference / abs(expected) if expected else (0.0 if difference == 0 else math.inf)


def checksum_at_start(environment: Mapping[str, Any]) -> str | None:
    """The checksum that a run recorded of the masters before its first step; None without one, and of a resumed run."""
    rows = {row["what"]: row["dtype"] for row in environment.get("ledger", ())}
    line = rows.get(START, "")
    return None if not line or line.startswith("those of") else checksum_in(line)


def checksum_in(line: str) -> str:
    """The checksum in a `training.engine.masters.Start` as text."""
    return line.rpartition("(checksum ")[2].rstrip(")")
