"""Whether values differ from a reference by rounding alone."""

from __future__ import annotations

import torch

from precision.tolerance import tolerance


def agrees(
    values: torch.Tensor,
    reference: torch.Tensor,
    dtype: torch.dtype,
    terms: int = 1,
    *,
    magnitude: torch.Tensor | float | None = None,
) -> bool:
    """Whether `values`, computed in `dtype` with `terms` roundings in a row, are rounding errors away from `reference`.

    values: any shape and dtype. reference: the same shape, in a wider format. magnitude: what errors are relative to,
    broadcastable to the shape: for sums and dot products the sum of |terms|; |reference| when left out. A result in the
    subnormal range of `dtype` may also be off by half its smallest subnormal. nan, inf and a result that overflowed
    never agree with a finite reference; where the reference is nan or inf, `values` has to be the same.
    """
    exact, got = reference.double(), values.double()
    scale = exact.abs() if magnitude is None else torch.as_tensor(magnitude, dtype=torch.float64, device=exact.device)
    info = torch.finfo(dtype)
    smallest_subnormal = info.smallest_normal * info.eps
    bound = tolerance(terms, dtype) * scale + smallest_subnormal / 2
    close = (got - exact).abs() <= bound
    same = (got == exact) | (got.isnan() & exact.isnan())
    return bool(torch.where(exact.isfinite(), close & got.isfinite(), same).all())
