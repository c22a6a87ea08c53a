"""How unusual a number is, compared with the healthy numbers before it.

    score = (value - median) / (1.4826 x MAD)

Median and median absolute deviation tolerate outliers in up to half of the window (Rousseeuw and Croux 1993, section
1), and for normal data 1.4826 x MAD estimates the standard deviation. Quantities that vary by factors, such as gradient
norms, go into the window as logarithms. Until the window is half full there is no score, because the MAD of a handful
of values is often far too small. The window's owner pushes only values that were accepted.
"""

from collections import deque
from statistics import median
from typing import Any

NORMAL_CONSISTENCY = 1.4826
"""1 / the 75% quantile of the standard normal: turns a MAD into a standard deviation for normal data."""
_FLOOR = 0.01
"""Lower limit of the standard deviation, in the values' unit."""


class RobustWindow:
    """The newest `size` accepted values of one quantity. Memory and time are O(size); 128 values take microseconds."""

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self._size = size

    def __len__(self) -> int:
        return len(self._values)

    @property
    def median(self) -> float | None:
        """Median of the values; None while the window is less than half full."""
        return median(self._values) if 2 * len(self._values) >= self._size else None

    def push(self, value: float) -> None:
        """Add an accepted value, which is finite."""
        self._values.append(float(value))

    def score(self, value: float) -> float | None:
        """Robust standard deviations of `value` above (positive) or below the median; None until half full."""
        center = self.median
        if center is None:
            return None
        spread = NORMAL_CONSISTENCY * median(abs(item - center) for item in self._values)
        return (value - center) / max(spread, _FLOOR)

    def state_dict(self) -> dict[str, Any]:
        """The values, oldest first, as plain floats."""
        return {"values": list(self._values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; a smaller window than the saved one keeps the newest values."""
        self._values = deque((float(value) for value in state["values"]), maxlen=self._size)
