"""The sampler's distance from the trainer's policy on sampled tokens, relative to the trainer's own rounding.

For a token drawn from mu, d = log pi - log mu; k1 = -d and k3 = e^d - 1 - d estimate KL(mu || pi) (Schulman 2020), and
for small d k3 is d^2 / 2. The trainer's *self-gap* is the larger k3 of two recomputations of its own log-probabilities:
in batches of other shapes, and in FP32 with the same weights, which is its rounding. A sampler that rounds as much,
independently, has twice that k3; in BF16 vLLM had 1.0 times a real model's self-gap, and 40 times with a stale head.
Dropout in the trainer would hide in a larger self-gap: OF_SAMPLER times the sampler's distance from FP32 is its limit.

A sampler that draws from a part of the tokens (top-p) gives each a larger mu: k3 may stay small, but all d have one
sign. |mean d| / mean |d| is then 1, and 0.07 in a sound run. Its bound counts what exceeds three standard errors (more
for few prompts, by Student's t), that of k3 what exceeds one; they are over prompts, whose tokens are alike.
"""

import math
from collections.abc import Sequence

import numpy as np

FLOOR = 1e-9  # smallest self-gap: FP32's was 5e-11, and a tiny model may repeat itself bit for bit
OF_SAMPLER = 4.0
ONE_SIDED = 0.3  # largest healthy |mean d| / mean |d|
_MEMORY = 0.9  # of the self-gap's moving average (self_usual), since a step measures it on few tokens


def measure(
    apart: np.ndarray, mask: np.ndarray, self_gaps: Sequence[list[np.ndarray]], bound: float, before: dict[str, float]
) -> dict[str, float]:
    """Metrics of a step before anything is truncated, the same on all ranks. apart: (prompts, group, tokens) d, where
    `mask` is true. self_gaps: of each rank, d of the trainer and either recomputation, and of FP32 and the sampler.
    bound: grpo.max_gap. before: metrics of the step before, or none."""
    apart = apart.astype(np.float64).clip(max=100.0)  # of which e^d can be squared
    tokens, excess = apart[mask], np.expm1(apart) - apart
    shapes, wide, sampler = (_k3(np.concatenate(parts)) for parts in zip(*self_gaps, strict=True))
    own = max(FLOOR, min(max(shapes, wide), OF_SAMPLER * sampler))
    usual = _MEMORY * before.get("gap/self_usual", own) + (1 - _MEMORY) * own
    k3, mean, size = _k3(tokens), float(tokens.mean()), float(np.abs(tokens).mean())
    judged = len(apart) > 1 and size > math.sqrt(2 * FLOOR)
    beyond = (abs(mean) - _errors(len(apart)) * _error(apart, mask, mean)) / size if judged else 0.0
    further = max(0.0, k3 - _error(excess, mask, k3)) / (bound * max(own, usual))
    found = {
        "gap/k1": -mean,
        "gap/k3": k3,
        "gap/largest": float(np.abs(tokens).max()),
        "gap/one_sided": abs(mean) / size if size else 0.0,
        "gap/self_k3": own,
        "gap/self_usual": usual,
        "gap/outside": float((np.abs(np.expm1(tokens)) > 0.1).mean()),
        "gap/of_bound": max(further, beyond / ONE_SIDED),
    }
    quarter = np.arange(mask.shape[-1]) * 4 // mask.sum(-1, keepdims=True)
    return found | {f"gap/k3_quarter_{n + 1}": _k3(apart[mask & (quarter == n)]) for n in range(4)}


def _errors(prompts: int) -> float:
    """Standard errors exceeded in 0.27% of cases: Student's t by Fisher's expansion (Abramowitz and Stegun, 26.7.5)."""
    free = prompts - 1
    return math.sqrt(prompts / free) * (3 + 7.5 / free + 17.25 / free**2 + 30.19 / free**3)


def _error(values: np.ndarray, mask: np.ndarray, mean: float) -> float:
    """Standard error of the mean over all tokens, from the sums of each prompt's."""
    sums = np.where(mask, values - mean, 0.0).sum((1, 2))
    return math.sqrt(float((sums**2).sum())) / int(mask.sum())


def _k3(apart: np.ndarray) -> float:
    return float((np.expm1(apart, dtype=np.float64) - apart).mean()) if len(apart) else 0.0
