"""The loss of 16 bits on whole gradients, value by value in FP64: the reference of telemetry's fast statistics."""

from typing import NamedTuple

import torch

from precision.statistics import Named


class Underflow(NamedTuple):
    """Shares of a tensor's values, each a () float32 tensor in [0, 1]; 0 for a tensor without values that are not 0."""

    below_normal: torch.Tensor
    """Share of the finite non-zero values below the smallest normal number: kept with fewer bits, or lost."""
    flushed: torch.Tensor
    """Share of the finite non-zero values that round to zero."""


class GradientStatistics(NamedTuple):
    """Statistics of one module's gradients together; each a () float32 tensor."""

    norm: torch.Tensor
    """L2 norm, in gradient units."""
    maximum: torch.Tensor
    """Largest magnitude, in gradient units; nan if any value is nan."""
    below_normal: torch.Tensor
    flushed: torch.Tensor


def underflow_share(values: torch.Tensor, dtype: torch.dtype) -> Underflow:
    """The share of values (any shape, floating) that underflow in `dtype`; inf and nan do not underflow."""
    info = torch.finfo(dtype)
    # In FP64, where neither limit is subnormal: a device may flush those.
    magnitude = values.detach().double().abs()
    nonzero = (magnitude > 0) & magnitude.isfinite()
    total = nonzero.sum().clamp(min=1)
    below = nonzero & (magnitude < info.smallest_normal)
    flushed = nonzero & (magnitude <= info.smallest_normal * info.eps / 2)
    return Underflow((below.sum() / total).float(), (flushed.sum() / total).float())


def gradient_statistics(gradients: Named, dtype: torch.dtype, *, scale: float = 1.0) -> dict[str, GradientStatistics]:
    """Per module: norm, largest value and underflow in `dtype` of its own parameters' gradients.

    gradients: (full parameter name, gradient in gradient units), FP32 or wider than `dtype`. scale: the loss scale that
    the backward pass in `dtype` would multiply them by. The module is the parameter's name without its last part.
    """
    grouped: dict[str, list[torch.Tensor]] = {}
    for name, gradient in gradients:
        grouped.setdefault(name.rpartition(".")[0], []).append(gradient.detach().reshape(-1))
    result = {}
    for module, parts in grouped.items():
        values = torch.cat([part.double() for part in parts])
        lost = underflow_share(values * scale, dtype)
        maximum = values.abs().amax() if values.numel() else values.new_zeros(())
        result[module] = GradientStatistics(values.norm().float(), maximum.float(), *lost)
    return result
