"""FP8 by its definition, to compare `precision.fp8` and the kernels with: no FP8 dtype of torch, no line of that file.

Rounding is written out in FP64, where dividing by a power of two, rounding to an integer (ties to even) and multiplying
back are exact: the formats are those of Micikevicius et al. 2022, "FP8 Formats for Deep Learning". What computes in FP8
and over which values a scale goes is said in docs/fp8.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from config.schema import Fp8Section
from precision.tolerance import CONFIDENCE, unit_roundoff

Name = Literal["e4m3", "e5m2"]
Product = Literal["output", "input gradient", "weight gradient"]


class Format(NamedTuple):
    """A format of 8 bits."""

    stored: int
    """[bits] Explicit mantissa bits."""
    smallest: int
    """Exponent of the smallest normal number."""
    largest: float


FORMATS = {"e4m3": Format(3, -6, 448.0), "e5m2": Format(2, -14, 57344.0)}
_BLOCK = 32
_SCALES = (-126, 127)
"""Smallest and largest exponent of a scale: those of normal FP32 numbers."""


def rounded(values: torch.Tensor, name: Name, scaling: str) -> torch.Tensor:
    """`values` as FP8 has them, FP64, each with the scale of those it is summed with: along the last dimension.

    values: any shape and floating dtype. scaling: of Fp8Section. Where one of those that share a scale is not finite
    all are nan.
    """
    if scaling == "block32":
        blocks = [rounded(part, name, "row") for part in values.split(_BLOCK, dim=-1)]
        return torch.cat(blocks, dim=-1)
    wide, to = values.double(), FORMATS[name]
    largest = wide.abs().amax() if scaling == "tensor" else wide.abs().amax(-1, keepdim=True)
    # largest / to.largest = mantissa 2^exponent, 1/2 <= mantissa < 1: the next power of two, itself where it is one
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
    """(rows, summed) and (columns, summed), FP64: what a linear layer multiplies for one of its three products.

    inputs: (tokens, in), in the dtype around the layer. weight: (out, in), the master. gradient: (tokens, out), of the
    output; None for the output itself.
    """
    if gradient is None or product == "output":
        return rounded(inputs, "e4m3", section.scaling), rounded(weight, "e4m3", section.scaling)
    if product == "input gradient":
        return rounded(gradient, section.gradient, section.scaling), rounded(weight.t(), "e4m3", section.scaling)
    if section.weight_gradient == "fp8":
        return (
            rounded(gradient.t(), section.gradient, section.scaling),
            rounded(inputs.t(), "e4m3", section.scaling),
        )
    return gradient.t().double(), inputs.t().double()


def off_by(
    found: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    ambient: torch.dtype,
    bias: torch.Tensor | None = None,
) -> tuple[float, float]:
    """Norm of the difference between `found` and left right^T + bias, and how large rounding may make it.

    Two roundings to the dtype around the layer, each relative to the result (or the bias), and the sum in FP32,
    relative to the sum of magnitudes (Higham and Mary 2019, theorem 2.4). found: (rows, columns). left, right: see
    `operands`. bias: (columns,).
    """
    exact, magnitudes = left @ right.t(), left.abs() @ right.abs().t()
    added = torch.zeros_like(exact) if bias is None else bias.double().expand_as(exact)
    in_sum = CONFIDENCE * left.shape[-1] ** 0.5 * unit_roundoff(torch.float32)
    allowed = 2 * unit_roundoff(ambient) * (exact.norm() + added.norm()) + in_sum * magnitudes.norm()
    off, bound = torch.stack([(found.double() - exact - added).norm(), allowed]).tolist()
    return off, bound


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, section: Fp8Section) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.section = section
        found = _product(operands("output", inputs.flatten(0, -2), weight, None, section), inputs.dtype)
        return found.view(*inputs.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        given = (inputs.flatten(0, -2), weight, gradient.flatten(0, -2), ctx.section)
        of_inputs = of_weight = None
        if ctx.needs_input_grad[0]:
            of_inputs = _product(operands("input gradient", *given), inputs.dtype).view_as(inputs)
        if ctx.needs_input_grad[1]:
            of_weight = _product(operands("weight gradient", *given), inputs.dtype).to(weight.dtype)
        return of_inputs, of_weight, None


def _product(pair: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """left right^T, summed in FP32, which holds the operands exactly."""
    left, right = (operand.float() for operand in pair)
    return (left @ right.t()).to(dtype)


def linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, ambient: torch.dtype, section: Fp8Section
) -> torch.Tensor:
    """inputs W^T + bias in `ambient`, with gradients. inputs: (..., in), any floating dtype. weight: (out, in)."""
    output = _Linear.apply(inputs.to(ambient), weight, section)
    return output if bias is None else output + bias.to(ambient)


@contextmanager
def in_fp8(model: torch.nn.Module, names: Collection[str], section: Fp8Section) -> Iterator[None]:
    """Inside, these linear layers of an FP32 model compute in FP8 and nothing else does, forward and backward."""
    layers: Sequence[torch.nn.Module] = [model.get_submodule(name) for name in names]
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = _forward_of(layer, section)
    try:
        yield
    finally:
        for layer, known in zip(layers, before, strict=True):
            if known is None:
                del layer.forward
            else:
                layer.forward = known


def _forward_of(layer: Any, section: Fp8Section) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(input: torch.Tensor) -> torch.Tensor:
        return linear(input, layer.weight, layer.bias, ambient=input.dtype, section=section)

    return forward
