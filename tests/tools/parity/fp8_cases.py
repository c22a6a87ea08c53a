"""Functions that run inside the processes of test_fp8.py. Every function is called on every rank."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from config.schema import Fp8Section
from precision import fp8
from tests.support.models.small_run import batch_of
from tests.tools.parity.step_cases import compared
from training.distributed import World

LAYER = "model.layers.0.mlp.down_proj"


def measured_steps(
    world: World, *, stage: int, steps: int, wrong: str | None = None, overrides: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Some real steps in FP8, each held against FP32. wrong: what one layer does otherwise, of WRONG."""
    rows, applied = [], 0
    with compared(world, stage=stage, compute="fp32", overrides=overrides) as (engine, parity):
        if wrong is not None:
            layer: Any = engine.model.get_submodule(LAYER)
            layer.forward = WRONG[wrong](layer)
        for step in range(1, steps + 1):
            rows.append(parity.step(batch_of(world, 2, seed=step), applied=applied))
            applied += rows[-1]["applied"]
    return rows


def _forward(layer: Any, section: Fp8Section, quantise: Callable[..., Any] | None = None) -> Callable[..., Any]:
    def forward(input: torch.Tensor) -> torch.Tensor:
        with _quantising(quantise or fp8.quantise), torch.autocast("cpu", enabled=False):
            return fp8.linear_fp8(input, layer.weight, layer.bias, ambient=torch.bfloat16, section=section)

    return forward


@contextmanager
def _quantising(quantise: Callable[..., Any]) -> Iterator[None]:
    known, fp8.quantise = fp8.quantise, quantise
    try:
        yield
    finally:
        fp8.quantise = known


def _with(scale_of: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> Callable[..., Any]:
    """Rounding with another scale, and values beyond the format's largest clipped."""

    def quantise(values: torch.Tensor, dim: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        wide, top = values.float(), torch.finfo(dtype).max
        largest = wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True)
        scale = scale_of(largest, dtype)
        return (wide / scale).clamp(-top, top).to(dtype), scale

    return quantise


def _towards_zero(values: torch.Tensor, dim: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    wide = values.float()
    scale = fp8.scale_of(wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True), dtype)
    mantissa, exponent = torch.frexp(wide / scale)
    return torch.ldexp(torch.trunc(mantissa * 16) / 16, exponent).to(dtype), scale


class _LostTokens(torch.autograd.Function):
    """The weight itself; its gradient without a part of it."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 0.95


def _lost_gradient(layer: Any) -> Callable[..., Any]:
    def forward(input: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            weight = _LostTokens.apply(layer.weight)
            return fp8.linear_fp8(input, weight, layer.bias, ambient=torch.bfloat16, section=Fp8Section())

    return forward


def _in_bf16(layer: Any) -> Callable[..., Any]:
    return lambda input: functional.linear(input.bfloat16(), layer.weight.bfloat16())


def _clipping(layer: Any) -> Callable[..., Any]:
    return _forward(layer, Fp8Section(), _with(lambda largest, dtype: fp8.scale_of(largest / 2, dtype)))


def _plain_scales(layer: Any) -> Callable[..., Any]:
    return _forward(layer, Fp8Section(), _with(lambda largest, dtype: largest / torch.finfo(dtype).max))


def _weight_rounded_twice(layer: Any) -> Callable[..., Any]:
    def forward(input: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            weight = layer.weight + (layer.weight.bfloat16().float() - layer.weight).detach()
            return fp8.linear_fp8(input, weight, layer.bias, ambient=torch.bfloat16, section=Fp8Section())

    return forward


WRONG: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "clips": _clipping,
    "plain scales": _plain_scales,
    "weight rounded twice": _weight_rounded_twice,
    "rounds towards zero": lambda layer: _forward(layer, Fp8Section(), _towards_zero),
    "gradient in e5m2": lambda layer: _forward(layer, Fp8Section(gradient="e5m2")),
    "weight gradient in fp8": lambda layer: _forward(layer, Fp8Section(weight_gradient="fp8")),
    "5% of a gradient lost": _lost_gradient,
    "not in fp8": _in_bf16,
}
"""Wrong forward passes of a layer by name. Each is another arithmetic than the plan's, some as near to FP32."""
