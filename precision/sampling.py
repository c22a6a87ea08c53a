"""Statistics of all tensors of a model at once: few kernels, no waiting for the device, little memory.

Sums of squares and maxima cover every value. Questions that would take a pass each (how many values are subnormal, at
which power of two they are) are answered from at most SAMPLE evenly spaced values of a tensor: the standard error of a
share is at most 0.4% of all values, and that of an update's norm about 1%.
"""

import math
from collections.abc import Sequence

import torch

SAMPLE = 1 << 14
"""Largest number of values sampled from a tensor."""
EXPONENTS = 256
"""Bins of a histogram by the 8 exponent bits of FP32; bin e holds 2^(e - 127) <= |x| < 2^(e - 126), bin 0 all smaller
values."""


def sampled(values: torch.Tensor) -> torch.Tensor:
    """(n,) copy of at most SAMPLE evenly spaced values of a flat tensor."""
    return values[:: max(1, -(-len(values) // SAMPLE))].clone()


def sums_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(tensors,) FP64: the sum of squares of each tensor, accumulated in FP32."""
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float32)
    return torch.stack([norm.double().square() for norm in norms])


def largest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(tensors,) FP64: the largest magnitude of each, none empty; nan where a value is nan."""
    return torch.stack([largest_of(values) for values in tensors]).double()


def largest_of(values: torch.Tensor) -> torch.Tensor:
    """() FP32: the largest magnitude of a tensor that is not empty; nan where a value is nan. One pass, no copy."""
    low, high = torch.aminmax(values)
    return torch.maximum(-low, high).float()


def exponent_counts(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    """(samples, EXPONENTS + 1) int64: number of values of each finite FP32 sample per exponent, zeros in the last."""
    lengths = torch.tensor([len(sample) for sample in samples], device=samples[0].device)
    values = torch.cat(list(samples))
    exponents = (values.view(torch.int32) >> 23) & (EXPONENTS - 1)
    exponents = torch.where(values == 0, EXPONENTS, exponents)
    rows = torch.repeat_interleave(lengths, output_size=len(values)) * (EXPONENTS + 1)
    counts = torch.bincount(rows + exponents, minlength=len(samples) * (EXPONENTS + 1))
    return counts.view(len(samples), EXPONENTS + 1)


def bins_below(limit: float) -> int:
    """The number of bins of `exponent_counts`, from the first, that hold magnitudes below `limit`, a power of two."""
    return min(max(math.frexp(limit)[1] - 1 + 127, 0), EXPONENTS)


def counts_in_bins(counts: torch.Tensor, bins: torch.Tensor) -> torch.Tensor:
    """(samples, n) int64: number of nonzero values in the first `bins`, (samples, n), of each sample's `counts`, which
    come from `exponent_counts`; EXPONENTS bins hold them all."""
    return torch.nn.functional.pad(counts[:, :EXPONENTS].cumsum(1), (1, 0)).gather(1, bins)


def distances(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(2,) FP64: maximum and sum of squares of |weight - rounded master| / |rounded master|, with the master rounded to
    the weight's dtype; 0 in a healthy run. Both tensors have the same shape and are not empty."""
    rounded = master.to(weight.dtype).double()
    difference = (weight.double() - rounded).abs()
    relative = torch.where(difference == 0, difference, difference / rounded.abs())
    return torch.stack([relative.amax(), relative.square().sum()])
