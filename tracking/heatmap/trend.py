"""Fit the growth of a magnitude and predict the step at which it reaches a limit."""

import math
from dataclasses import dataclass

import numpy as np

_LEAST = 6  # minimum number of points for a trend
_MOST = 60  # maximum number of points in a fit, which compares all pairs
_LEAST_GROWTH = 1.1  # minimum growth factor over the points
_CERTAIN = 4.0  # minimum ratio of the growth to the median distance of the points from the line


@dataclass(frozen=True)
class Trend:
    """Growth of a positive magnitude over its most recent points."""

    value: float
    """Value of the fitted line at the last point."""
    last: float
    """[step] Position of the last point."""
    rate: float
    """[per step] Logarithmic growth at the last point."""
    linear: bool
    """Whether it grows by a constant amount per step rather than a constant factor."""

    @property
    def per_100_steps(self) -> float:
        """[fraction] Growth over the next 100 steps."""
        return 100 * self.rate if self.linear else math.expm1(min(100 * self.rate, 100.0))

    def reaches(self, limit: float) -> float:
        """Step at which it reaches `limit` if the growth continues."""
        if self.linear:
            return self.last + (limit / self.value - 1) / self.rate
        return self.last + math.log(limit / self.value) / self.rate


def trend(steps: np.ndarray, values: np.ndarray) -> Trend | None:
    """Growth of `values` at `steps`, both (points,); None if they do not clearly grow.

    Uses the Theil-Sen slope, the median over all pairs of points (P. K. Sen, JASA 63, 1968), which is robust to single
    spikes. The fit uses all points, else the newest half, else the newest quarter, whichever first shows clear growth.
    The better of a line through the values and one through their logarithms counts.
    """
    usable = np.isfinite(values) & (values > 0)
    at, sizes = steps[usable].astype(float), values[usable].astype(float)
    for share in (1, 2, 4):
        count = len(at) // share
        if count < _LEAST:
            break
        chosen = np.unique(np.linspace(len(at) - count, len(at) - 1, min(count, _MOST)).astype(int))
        found = _fit(at[chosen], sizes[chosen])
        if found is not None:
            return found
    return None


def _fit(at: np.ndarray, sizes: np.ndarray) -> Trend | None:
    """Fit a few points, at least two of which differ in their step; None if they do not clearly grow."""
    logs = np.log(sizes)
    slope, level, spread = _line(at, logs)
    straight, height, distance = _line(at, sizes)
    span = at[-1] - at[0]
    linear = height > 0 and distance / height < spread
    rate = straight / height if linear else slope
    growth = math.log(max(1e-9, height / max(height - straight * span, height * 1e-9))) if linear else slope * span
    if growth < math.log(_LEAST_GROWTH) or growth < _CERTAIN * min(spread, distance / abs(height)):
        return None
    return Trend(height if linear else math.exp(level), at[-1], rate, linear)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """(slope, value at the last point, median distance of the points) of the Theil-Sen line."""
    low, high = np.triu_indices(len(x), 1)
    slope = float(np.median((y[high] - y[low]) / (x[high] - x[low])))
    level = float(np.median(y - slope * x))
    return slope, level + slope * float(x[-1]), float(np.median(np.abs(y - level - slope * x)))
