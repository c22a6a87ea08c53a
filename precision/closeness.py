"""Is a computation as close to the exact values as plain torch in the same dtype is?

Three tensors of the same values: a run's, those of plain torch in the run's dtype (the plan), and those in a wider
dtype, which count as exact. Errors are divided by what is expected of each value, e^2 = (u x)^2 + m^2, m the root mean
square of the plan's errors in its row or in a usual row where that is more: one row that holds most of a tensor's
energy (Sun et al. 2024, "Massive activations in large language models") would otherwise be all that is judged.

- *Size*: the mean square of the run's errors is at most the square of a factor times the plan's.
- *Bias*: <run - plan, x> / <x, x> is zero within a share of u. A wrong factor is in every value, and so shows here long
  before it shows in the size.

Either is allowed six standard errors of the difference of two computations that scatter by row as the plan's does.
"""

from __future__ import annotations

import torch

OTHER_KERNEL = 1.15
"""[factor] Tolerated size of errors of a kernel that sums in another order, as in `tools.parity.rounding`."""
IN_HALVES = 2.5
"""[factor] The same for linear layers: a kernel may round both halves of a sum, the sum, and the sum with its bias.
The largest of 240 layers was 2.24."""
_SURE = 6.0
"""Standard errors beyond which chance is no explanation."""
_BIAS, _BIAS_FP32 = 0.2, 2.0
"""[u] Tolerated bias. Products of 8-bit numbers near a power of two are not rounded symmetrically: BF16's own is 0.1 u
in a norm. FP32's roundings are of statistics, one for a whole row."""
_FLOOR, _FLOOR_FP32 = 0.2, 4.0
"""[u] Tolerated size where the plan has no error."""


def distance(
    run: torch.Tensor, plan: torch.Tensor, exact: torch.Tensor, *, roundoff: float, kernel: float = OTHER_KERNEL
) -> torch.Tensor:
    """(2,) float64: the run's error and its bound, of the size or of the bias, whichever is nearer to it or beyond.

    All of the same shape, rows being independent. roundoff: u of the run's dtype. Both are relative; the error is inf
    where the run has values that are not finite and the exact ones are. No device sync.
    """
    x, run, plan = (item.detach().double().reshape(-1, item.shape[-1]) for item in (exact, run, plan))
    floor, tilt = (_FLOOR_FP32, _BIAS_FP32) if roundoff < 2.0**-20 else (_FLOOR, _BIAS)
    e = _expected(x, plan - x, roundoff)
    weighted, off, planned = x / e, (run - x) / e, (plan - x) / e
    by_row = planned.square().mean(1)
    chance = _SURE * (2 / len(x)) ** 0.5 * by_row.std(correction=0)
    size = torch.stack([off.square().mean(), kernel**2 * by_row.mean() + floor**2 + chance]).sqrt() * roundoff
    energy = weighted.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
    chance = _SURE * 2**0.5 * (planned * weighted).sum(1).norm() / energy
    bias = torch.stack([((off - planned) * weighted).sum().abs() / energy, chance + tilt * roundoff])
    found = torch.where(bias[0] / bias[1] > size[0] / size[1], bias, size)
    finite = run.isfinite().all() | ~x.isfinite().all()
    return torch.where(finite, found.nan_to_num(0.0), found.new_tensor([torch.inf, 1.0]))


def _expected(x: torch.Tensor, off: torch.Tensor, roundoff: float) -> torch.Tensor:
    """The expected error of each value of x, (rows, width) float64, none of them 0; off: the plan's errors."""
    rows = off.square().mean(1, keepdim=True)
    expected = (roundoff * x).square() + torch.maximum(rows, rows.median())
    least = roundoff**2 * x.square().mean()
    return torch.where(expected > 0, expected, torch.where(least > 0, least, 1.0)).sqrt()
