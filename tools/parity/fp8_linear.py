"""Linear layers that compute in FP8 by its definition (`precision.fp8_reference`), forward and backward."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.function import once_differentiable

from config.schema import Fp8Section
from precision.fp8_reference import operands


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
    """Context manager: only these linear layers of an FP32 model compute in FP8, forward and backward."""
    with ExitStack() as stack:
        for layer in map(model.get_submodule, names):
            stack.enter_context(patch.object(layer, "forward", partial(_forward, layer, section)))
        yield


def _forward(layer: Any, section: Fp8Section, input: torch.Tensor) -> torch.Tensor:
    return linear(input, layer.weight, layer.bias, ambient=input.dtype, section=section)
