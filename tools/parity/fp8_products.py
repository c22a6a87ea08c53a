"""Compares the three products of every FP8 layer of a run with FP8's definition on the layer's own inputs.

For a step's first micro-batch: the output from the input, and in the backward pass the gradients of input and weight
from the incoming gradient. Rounding must be the same bit for bit (`precision.fp8_reference`), so only the sums and the
surrounding dtype's rounding may differ. An error shows in the layer that makes it alone, in either pass, however small
relative to FP8's own error. The inputs of all FP8 layers of a micro-batch are held until its backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from precision.dtypes import DTYPES
from precision.fp8_reference import Product, off_by, operands
from precision.regions import Regions
from training.distributed import World


class Fp8Products:
    """One step's products of all FP8 layers that a reference and a run's model share."""

    def __init__(
        self, reference: torch.nn.Module, candidate: torch.nn.Module, regions: Regions | None, world: World
    ) -> None:
        """reference: in FP32, its weights the masters. regions: the candidate's; None: nothing computes in FP8. world:
        ranks that each have a part of the step."""
        names = regions.names_in("fp8") if regions else ()
        self._modules: dict[str, Any] = {name: candidate.get_submodule(name) for name in names}
        self._references: dict[str, Any] = {name: reference.get_submodule(name) for name in names}
        self._regions, self._world = regions, world
        self._inputs: dict[str, torch.Tensor] = {}
        """(tokens, in) of each layer's first call with gradients, in the dtype around the layer."""
        self._gradients: dict[str, torch.Tensor] = {}
        """(tokens, out) gradients that arrived at the same calls."""
        self._found: dict[tuple[str, Product], tuple[float, float]] = {}

    @contextmanager
    def of_candidate(self) -> Iterator[None]:
        """Context manager around the candidate's pass."""
        with ExitStack() as stack:
            for name, module in self._modules.items():
                before = functools.partial(self._entering, name)
                after = functools.partial(self._leaving, name)
                stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(after, with_kwargs=True))
                if module.weight.requires_grad:
                    of_weight = functools.partial(self._backward, name, "weight gradient")
                    stack.enter_context(module.weight.register_hook(of_weight))
            yield
        self._inputs.clear()
        self._gradients.clear()

    def measured(self) -> list[dict[str, Any]]:
        """Rows {"module", "part", "off", "allowed"}: the norm of the difference, and the most that rounding explains,
        over all ranks. A collective."""
        squares: dict[tuple[str, Product], list[float]] = {}
        for found in self._world.gather_objects(self._found):
            for key, values in found.items():
                known = squares.setdefault(key, [0.0, 0.0])
                squares[key] = [total + value**2 for total, value in zip(known, values, strict=True)]
        return [
            {"module": name, "part": part, "off": off**0.5, "allowed": allowed**0.5}
            for (name, part), (off, allowed) in squares.items()
        ]

    def _entering(self, name: str, module: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Give the layer a view of its input, which others read too: the view's gradient is this layer's alone."""
        given = args[0] if args else kwargs["input"]
        if not (torch.is_grad_enabled() and given.requires_grad) or name in self._inputs:
            return None
        own = given.view_as(given)
        own.register_hook(functools.partial(self._backward, name, "input gradient"))
        return ((own, *args[1:]), kwargs) if args else (args, {**kwargs, "input": own})

    @torch.no_grad()
    def _leaving(self, name: str, module: Any, args: tuple, kwargs: dict[str, Any], output: torch.Tensor) -> None:
        given = (args[0] if args else kwargs["input"]).detach()
        if name not in self._inputs:
            inputs = given.flatten(0, -2).to(self._ambient(name))
            if (name, "output") not in self._found:
                self._compare(name, "output", inputs, output.detach().flatten(0, -2), None)
            if output.requires_grad:
                self._inputs[name] = inputs
                output.register_hook(functools.partial(self._output_gradient, name))

    def _output_gradient(self, name: str, gradient: torch.Tensor) -> None:
        self._gradients[name] = gradient.detach().flatten(0, -2)

    @torch.no_grad()
    def _backward(self, name: str, part: Product, found: torch.Tensor) -> None:
        if name in self._gradients and (name, part) not in self._found:
            self._compare(name, part, self._inputs[name], found.detach().flatten(0, -2), self._gradients[name])

    @_disable_current_modes()  # a block that keeps its matmuls' results must not count these
    def _compare(
        self, name: str, part: Product, inputs: torch.Tensor, found: torch.Tensor, gradient: torch.Tensor | None
    ) -> None:
        assert self._regions is not None
        layer = self._references[name]
        left, right = operands(part, inputs, layer.weight, gradient, self._regions.fp8)
        bias = layer.bias if part == "output" else None
        self._found[(name, part)] = off_by(found, left, right, self._ambient(name), bias)

    def _ambient(self, name: str) -> torch.dtype:
        assert self._regions is not None
        return DTYPES[self._regions.ambient_of(name)]
