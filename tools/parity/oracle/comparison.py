"""One quantity that a run recorded, compared with what was recomputed."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
