"""Confidence in the mean of a few paired differences, the shift it can detect, and the pairs that another shift needs.

The mean of n differences whose standard deviation is estimated with f degrees of freedom is off by Student's t with f
degrees times that deviation over sqrt(n). Equivalence within a bound is shown at the level alpha when the 1 - 2 alpha
interval lies within it (two one-sided tests, Schuirmann 1987, J. Pharmacokinet. Biopharm. 15(6)). A two-sided test at
alpha finds a shift of (t_{1 - alpha/2} + t_power) times the standard error with probability `power` (Bloom 1995,
"Minimum Detectable Effects", Evaluation Review 19(5)), which is near the noncentral t's from three degrees on.
"""

from __future__ import annotations

import math
from bisect import bisect_left

ALPHA = 0.05
"""Probability of mistaking chance for a shift, and a shift as large as the bound for equivalence."""
POWER = 0.9
MOST_PAIRS = 10_000


def t_probability(t: float, degrees: int) -> float:
    """P(T <= t) of Student's t. Closed form for a whole number of degrees (Abramowitz and Stegun 1964, 26.7.3-4)."""
    angle = math.atan2(t, math.sqrt(degrees))
    cosine, total, term = math.cos(angle) ** 2, 0.0, 1.0
    if degrees % 2:
        term = math.cos(angle)
        for index in range(3, degrees + 1, 2):
            total += term
            term *= cosine * (index - 1) / index
        return 0.5 + (angle + math.sin(angle) * total) / math.pi
    for index in range(2, degrees + 1, 2):
        total += term
        term *= cosine * (index - 1) / index
    return 0.5 + math.sin(angle) * total / 2


def t_quantile(probability: float, degrees: int) -> float:
    """t with P(T <= t) = probability, in (0, 1). degrees: at least 1."""
    low, high = -1e6, 1e6
    while high - low > 1e-9 * max(1.0, abs(low + high)):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def half_width(scatter: float, pairs: int, degrees: int, *, confidence: float) -> float:
    """Half of the interval that contains the true mean with probability `confidence`. scatter: of one difference."""
    return t_quantile((1 + confidence) / 2, degrees) * scatter / math.sqrt(pairs)


def detectable(scatter: float, pairs: int, degrees: int, *, power: float = POWER) -> float:
    """The shift that a two-sided test at ALPHA detects with probability `power`."""
    return (t_quantile(1 - ALPHA / 2, degrees) + t_quantile(power, degrees)) * scatter / math.sqrt(pairs)


def pairs_needed(scatter: float, effect: float, *, controls: int = 0, power: float = POWER) -> int | None:
    """The fewest pairs, besides `controls` controls, that detect a shift of `effect`; None if MOST_PAIRS do not."""
    numbers = range(max(1, 2 - controls), MOST_PAIRS + 1)  # at least one degree of freedom

    def finds(pairs: int) -> bool:
        return detectable(scatter, pairs, pairs - 1 + controls, power=power) <= effect

    place = bisect_left(numbers, True, key=finds)  # each additional pair finds smaller shifts
    return numbers[place] if place < len(numbers) else None
