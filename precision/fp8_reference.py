"""FP8 by its definition, to check `precision.fp8` and the kernels against: no FP8 dtype of torch, no code of that file.

Rounding is written out in FP64, where dividing by a power of two, rounding to an integer (ties to even) and multiplying
back are exact. The formats are those of Micikevicius et al. 2022, "FP8 Formats for Deep Learning". docs/fp8.md says
what computes in FP8 and which values share a scale.
"""

from typing import Literal, NamedTuple

import torch

from config.schema import Fp8Section
from precision.tolerance import CONFIDENCE, unit_roundoff

Name = Literal["e4m3", "e5m2"]
Product = Literal["output", "input gradient", "weight gradient"]


class Format(NamedTuple):
    stored: int
    """[bits] Explicit mantissa bits."""
    smallest: int
    """Exponent of the smallest normal number."""
    largest: float


FORMATS = {"e4m3": Format(3, -6, 448.0), "e5m2": Format(2, -14, 57344.0)}
_BLOCK = 32
_SCALES = (-126, 127)  # smallest and largest exponent of a scale: those of normal FP32 numbers


def rounded(values: torch.Tensor, name: Name, scaling: str) -> torch.Tensor:
    """`values` rounded to FP8, as FP64; values along the last dimension, which are summed together, share a scale. If
    one of the values that share a scale is not finite, all become nan. scaling: as in Fp8Section."""
    if scaling == "block32":
        blocks = [rounded(part, name, "row") for part in values.split(_BLOCK, dim=-1)]
        return torch.cat(blocks, dim=-1)
    wide, to = values.double(), FORMATS[name]
    largest = wide.abs().amax() if scaling == "tensor" else wide.abs().amax(-1, keepdim=True)
    # largest / to.largest = mantissa 2^exponent, 1/2 <= mantissa < 1: the next power of two, or itself if it is one
    mantissa, exponent = torch.frexp(largest / to.largest)
    power = (exponent - (mantissa == 0.5).to(exponent.dtype)).clamp(*_SCALES)
    scale = torch.ldexp(torch.ones_like(largest), power)
    scaled = wide / scale
    step = torch.frexp(scaled)[1] - 1 - to.stored
    spacing = torch.ldexp(torch.ones_like(scaled), step.clamp(min=to.smallest - to.stored))
    found = torch.round(scaled / spacing) * spacing * scale
    return torch.where(largest.isfinite(), found, torch.nan)


def operands(
    product: Product, inputs: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor | None, section: Fp8Section
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, summed) and (columns, summed), FP64: the operands of one of a linear layer's three products."""
    if gradient is None or product == "output":
        return rounded(inputs, "e4m3", section.scaling), rounded(weight, "e4m3", section.scaling)
    if product == "input gradient":
        return rounded(gradient, section.gradient, section.scaling), rounded(weight.t(), "e4m3", section.scaling)
    if section.weight_gradient == "fp8":
        return (rounded(gradient.t(), section.gradient, section.scaling), rounded(inputs.t(), "e4m3", section.scaling))
    return gradient.t().double(), inputs.t().double()


def off_by(
    found: torch.Tensor, left: torch.Tensor, right: torch.Tensor, ambient: torch.dtype, bias: torch.Tensor | None = None
) -> tuple[float, float]:
    """Norm of the difference between `found` and left right^T + bias, and how large rounding may make it.

    The bound allows two roundings to the dtype around the layer, each relative to the result (or the bias), and the sum
    in FP32, relative to the sum of magnitudes (Higham and Mary 2019, theorem 2.4). left, right: see `operands`.
    """
    exact, magnitudes = left @ right.t(), left.abs() @ right.abs().t()
    added = torch.zeros_like(exact) if bias is None else bias.double().expand_as(exact)
    in_sum = CONFIDENCE * left.shape[-1] ** 0.5 * unit_roundoff(torch.float32)
    allowed = 2 * unit_roundoff(ambient) * (exact.norm() + added.norm()) + in_sum * magnitudes.norm()
    off, bound = torch.stack([(found.double() - exact - added).norm(), allowed]).tolist()
    return off, bound
