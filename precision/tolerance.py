"""Tolerances for comparisons with FP32, derived from the arithmetic that was done.

Every operation in a format with unit roundoff u is exact up to a factor (1 + d), |d| <= u (Higham 2002, section 2.2).
n of them in a row give at worst the factor gamma_n = n u / (1 - n u) (section 3.1), and treated as independent random
variables of mean zero about confidence * sqrt(n) * u (Higham and Mary 2019, theorem 2.4). Either bound is relative to
the sum of the magnitudes, not to the sum: with cancellation the relative error of the result itself is unbounded.
"""

import math

import torch

CONFIDENCE = 4.0
"""lambda of Higham and Mary: a bound fails with probability at most 2 exp(-lambda^2 (1 - u)^2 / 2), here 7e-4."""


def relative(off: float, size: float) -> float:
    """off / size; 0 where both are 0, inf where size alone is 0 or off is not finite."""
    if not math.isfinite(off):
        return math.inf
    return off / size if size else (math.inf if off else 0.0)


def unit_roundoff(dtype: torch.dtype) -> float:
    """u: the largest relative error of rounding a real number to nearest, half of torch.finfo(dtype).eps."""
    return torch.finfo(dtype).eps / 2


def worst_case(terms: int, dtype: torch.dtype) -> float:
    """gamma_n = n u / (1 - n u): no n roundings in a row are worse (Higham 2002, lemma 3.1). inf from n u = 1 on."""
    error = terms * unit_roundoff(dtype)
    return error / (1 - error) if error < 1 else math.inf


def expected(terms: int, dtype: torch.dtype) -> float:
    """exp(lambda sqrt(n) u + n u^2 / (1 - u)) - 1: what n independent roundings reach (Higham and Mary 2019, 2.4)."""
    u = unit_roundoff(dtype)
    exponent = CONFIDENCE * math.sqrt(terms) * u + terms * u * u / (1 - u)
    return math.expm1(exponent) if exponent < 700 else math.inf


def tolerance(terms: int, dtype: torch.dtype) -> float:
    """The tighter of both bounds, relative to the sum of the terms' magnitudes. terms: roundings, at least 1."""
    return min(worst_case(terms, dtype), expected(terms, dtype))
