"""Casts and roundings of an input that several layers share, such as the query, key and value projections.

The first of these layers computes them, and the others reuse them. The first pass shows which consecutive layers get
the same tensor; from then on only these keep anything for the next one, and nothing is kept after the last.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch


class SharedInputs:
    """The latest input of a model's layers, and the values derived from it that the next layer may reuse."""

    def __init__(self) -> None:
        self._alone: set[str] = set()
        """Layers that are not followed by another one with the same input."""
        self._layer = ""
        self._inputs: Callable[[], torch.Tensor | None] = lambda: None
        self._state: tuple[int, torch.dtype] | None = None
        self._kept: dict[Any, Any] = {}

    def at(self, layer: str, inputs: torch.Tensor, dtype: torch.dtype) -> dict[Any, Any] | None:
        """Values kept by the previous layer for the same tensor and `dtype`; this layer adds its own for the next.
        Empty if the tensor has changed since; None for an input that only one layer uses."""
        if inputs.is_inference():  # these have no version to tell whether they changed
            return None
        state = inputs._version, dtype
        same = self._inputs() is inputs and self._state == state
        (self._alone.discard if same else self._alone.add)(self._layer)
        found, keeps = self._kept if same else {}, layer not in self._alone
        self._layer, self._inputs, self._state = layer, weakref.ref(inputs), state
        self._kept = found if keeps else {}
        return found if found or keeps else None


def cast_once(kept: dict[Any, Any] | None, inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`inputs` in `dtype`, one copy for all layers; gradients are summed in the dtype of `inputs`, as with own casts.
    kept: the result of `SharedInputs.at`."""
    if kept is None or inputs.dtype == dtype:
        return inputs.to(dtype)
    if "cast" not in kept:
        kept.update(cast=inputs.detach().to(dtype), rest=inputs)
    found, kept["rest"] = _Cast.apply(kept["rest"], kept["cast"])
    return found


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, cast: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.dtype = inputs.dtype
        return cast.detach(), inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, of_cast: torch.Tensor | None, of_rest: torch.Tensor | None) -> Any:
        if of_cast is None:
            return of_rest, None
        return (of_cast.to(ctx.dtype) if of_rest is None else of_rest + of_cast), None
