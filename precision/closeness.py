"""Is a computation as close to the exact values as plain torch in the same dtype is?

Three tensors hold the same values: the run's, plain torch's in the run's dtype (the plan), and those in a wider dtype,
which count as exact. Errors are divided by each value's expected error, e^2 = (u x)^2 + m^2, with m the root mean
square of the plan's errors in its row or, if larger, in the median row: one row that holds most of a tensor's energy
(Sun et al. 2024, "Massive activations in large language models") would otherwise decide the verdict alone.

- *Size*: the mean square of the run's errors is at most the square of a factor times the plan's.
- *Bias*: <run - plan, x> / <x, x> is zero within a share of u. A wrong factor affects every value, so it shows here
  long before it shows in the size.

Both are allowed six standard errors of the difference between two computations whose rows scatter as the plan's do.
"""

import torch

OTHER_KERNEL = 1.15
"""[factor] Tolerated size of errors of a kernel that sums in a different order, as in `tools.parity.rounding`."""
IN_HALVES = 2.5
"""[factor] The same for linear layers: a kernel may round both halves of a sum, the sum, and the sum with its bias.
The largest factor in 240 layers was 2.24."""
_CODE = 64 * 2.0**-24
"""[fraction] Tolerated error of code in FP32: 64 of its roundoffs, for kernels that sum in another order. The same code
makes the same bits."""
_SURE = 6.0  # standard errors beyond which chance is no explanation
_BIAS, _BIAS_FP32 = 0.2, 2.0
"""[u] Tolerated bias. Products of 8-bit numbers near a power of two are not rounded symmetrically: BF16's own bias is
0.1 u in a norm. In FP32 it is statistics that are rounded, one for a whole row."""
_FLOOR, _FLOOR_FP32 = 0.2, 4.0  # [u] Tolerated size where the plan has no error


def distance(
    run: torch.Tensor, plan: torch.Tensor, exact: torch.Tensor, *, roundoff: float, kernel: float = OTHER_KERNEL
) -> torch.Tensor:
    """(2,) float64: the run's error and its bound, for size or bias, whichever has the larger ratio of error to bound.

    All tensors have the same shape, with independent rows. roundoff: u of the run's dtype. Error and bound are
    relative; the error is inf if the run has values that are not finite although all exact ones are. No device sync.
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


def distance_in_fp32(own: torch.Tensor, plan: torch.Tensor, exact: torch.Tensor, *, roundoff: float) -> torch.Tensor:
    """(2,) float64, error and bound as in `distance`, of a module's own code in FP32, where no rounding hides an error
    without a direction, such as that of a slightly wrong angle. plan: in the run's dtype; exact: plain torch's FP32."""
    x, own, plan = (item.detach().double().reshape(-1, item.shape[-1]) for item in (exact, own, plan))
    off = (own - x) / _expected(x, plan - x, roundoff)
    found = torch.stack([off.square().mean().sqrt() * roundoff, off.new_tensor(_CODE)])
    return torch.where(
        own.isfinite().all() | ~x.isfinite().all(), found.nan_to_num(0.0), found.new_tensor([torch.inf, 1.0])
    )


def _expected(x: torch.Tensor, off: torch.Tensor, roundoff: float) -> torch.Tensor:
    """The expected error of each value of x, (rows, width) float64, none of them 0; off: the plan's errors."""
    rows = off.square().mean(1, keepdim=True)
    expected = (roundoff * x).square() + torch.maximum(rows, rows.median())
    least = roundoff**2 * x.square().mean()
    return torch.where(expected > 0, expected, torch.where(least > 0, least, 1.0)).sqrt()
