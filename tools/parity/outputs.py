"""The error of each module's output against FP32: its own, and with the errors of the modules before it.

Measured on the first micro-batch of a step, in its forward pass. For the *own error* the FP32 module is called on the
candidate's inputs, converted to FP32, and both outputs are compared at once, so nothing is stored. The *output error*
needs FP32's outputs from its own pass; of each at most SAMPLE values, evenly spread, are kept.

Of modules that compute in FP8, or have some that do inside, the *planned error* is that of the FP32 module with nothing
but FP8's rounding in it (`precision.fp8_reference`), on the same inputs: what a sound one has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from config.errors import one_line
from modeling.embedding_noise import has_noise
from precision.findings import tensors_of
from precision.manifest import find_regions
from precision.regions import Regions
from precision.tolerance import relative
from tools.parity.fp8_linear import in_fp8
from tools.parity.recompute import is_off, map_floats
from tools.parity.slices import Slices
from training.distributed import World

SAMPLE = 65536
"""Values of an output that are kept for the output error, at most."""


class OutputErrors:
    """One step's outputs of the modules that two models share: a reference in FP32 and a candidate."""

    def __init__(
        self,
        reference: torch.nn.Module,
        candidate: torch.nn.Module,
        *,
        regions: Regions | None = None,
        world: World | None = None,
        slices: Slices | None = None,
    ) -> None:
        """regions: the candidate's, of the manifest path. world: whose ranks each have a part of the step; None where
        this process has all of it. slices: those that have a part of each module; None where each has all of it."""
        kinds = find_regions(reference)
        self._reference = dict(reference.named_modules())
        self._candidate = {
            name: module
            for name, module in candidate.named_modules()
            if (name in kinds or (name and next(module.children(), None) is None)) and not has_noise(module)
        }
        self._regions = regions
        self._eight_bit = regions.names_in("fp8") if regions else ()
        both = (*reference.modules(), *candidate.modules())
        self._adapted = [module for module in both if hasattr(module, "_disable_adapters")]
        self._world = world
        self._slices = slices or Slices(None)
        self._outputs: dict[str, torch.Tensor] = {}
        self._own: dict[str, torch.Tensor] = {}
        self._planned: dict[str, torch.Tensor] = {}
        self._accumulated: dict[str, torch.Tensor] = {}
        self._not_measured: dict[str, str] = {}

    @contextmanager
    def of_reference(self) -> Iterator[None]:
        """Context around the reference's pass, which comes first."""
        with self._hooks(self._reference, self._keep):
            yield

    @contextmanager
    def of_candidate(self) -> Iterator[None]:
        """Context around the candidate's pass."""
        with self._hooks(self._candidate, self._compare):
            yield

    def measured(self) -> dict[str, Any]:
        """{"order", "own_error", "planned_error", "output_error", "not_measured"}; relative L2 errors over all ranks. A
        collective.

        order: modules in the order of execution. inf where a value is not finite or only the reference is zero.
        """
        order = [name for name in self._own if name in self._accumulated]
        squares = torch.stack(
            [torch.cat([self._own[name], self._accumulated[name], self._planned[name]]) for name in order]
        )
        rows = (squares if self._world is None else self._world.sum(squares)).tolist()
        return {
            "order": order,
            "own_error": {name: relative(*row[:2]) ** 0.5 for name, row in zip(order, rows, strict=True)},
            "planned_error": {name: relative(*row[4:]) ** 0.5 for name, row in zip(order, rows, strict=True) if row[4]},
            "output_error": {name: relative(*row[2:4]) ** 0.5 for name, row in zip(order, rows, strict=True)},
            "not_measured": self._not_measured,
        }

    @contextmanager
    def _hooks(self, modules: dict[str, torch.nn.Module], callback: Any) -> Iterator[None]:
        def hook(name: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if not any(map(is_off, self._adapted)):  # a pass without adapters is the base's, not the one that trains
                # outside of the context in which transformers collects what the run's modules make
                Context().run(callback, name, args, kwargs, _first(output))

        with ExitStack() as stack:
            for name in self._candidate:
                stack.enter_context(modules[name].register_forward_hook(partial(hook, name), with_kwargs=True))
            yield

    @torch.no_grad()
    def _keep(self, name: str, args: Any, kwargs: Any, output: torch.Tensor | None) -> None:
        if output is not None and name not in self._outputs:  # neither later micro-batches nor a recomputation
            self._outputs[name] = _sampled(output).float().clone()

    @_disable_current_modes()  # a block that keeps its matmuls' results counts its own, not these
    @torch.no_grad()
    def _compare(self, name: str, args: Any, kwargs: Any, output: torch.Tensor | None) -> None:
        if output is None or name in self._own or name in self._not_measured:
            return
        module = self._reference[name]
        (args, kwargs), output = self._slices.inputs(name, args, kwargs), self._slices.output(name, output)
        try:
            with torch.autocast(output.device.type, enabled=False):
                exact = _first(module(*_in_fp32(args), **_in_fp32(kwargs)))
                planned = self._in_fp8(name, module, args, kwargs)
        except Exception as error:  # a module whose inputs cannot be converted is left out, by name
            self._not_measured[name] = one_line(error, 200)
            return
        if exact is None or exact.shape != output.shape or name not in self._outputs:
            self._not_measured[name] = "its outputs cannot be compared"
            return
        self._own[name] = _squares(output, exact)
        self._accumulated[name] = _squares(_sampled(output), self._outputs[name])
        self._planned[name] = _squares(exact if planned is None else planned, exact)

    def _in_fp8(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> torch.Tensor | None:
        """The reference's output with FP8's rounding in it; None where the plan has none in this module."""
        inside = [
            known.removeprefix(f"{name}.") if known != name else ""
            for known in self._eight_bit
            if f"{known}.".startswith(f"{name}.")
        ]
        if self._regions is None or not inside:
            return None
        with in_fp8(module, inside, self._regions.fp8):
            return _first(module(*_in_fp32(args), **_in_fp32(kwargs)))


def _squares(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """(2,) float64: sums of squares of the error and of the reference."""
    values, reference = values.double(), reference.double()
    return torch.stack([(values - reference).square().sum(), reference.square().sum()])


def _first(output: Any) -> torch.Tensor | None:
    """The first floating tensor of a module's output."""
    return next((tensor for tensor in tensors_of(output) if tensor.is_floating_point()), None)


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)]


def _in_fp32(tree: Any) -> Any:
    return map_floats(torch.Tensor.float, tree)
