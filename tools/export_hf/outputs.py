"""Error of each module's output relative to FP32: its own, and together with those of the modules before it.

For the *own error* the FP32 module is called on the candidate's inputs, converted to FP32, and both outputs are
compared at once, so nothing is stored. The *output error* needs FP32's outputs from its own pass; at most SAMPLE values
of each, evenly spread, are kept. Inside a step of a run `tools.parity.signature` measures more.
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
from precision.findings import tensors_of
from precision.manifest import find_regions
from precision.tolerance import relative
from tools.parity.recompute import map_floats

SAMPLE = 65536
"""At most this many values of an output are kept for the output error."""


class OutputErrors:
    """One pass's outputs of the modules that two models share: a reference in FP32 and a candidate."""

    def __init__(self, reference: torch.nn.Module, candidate: torch.nn.Module) -> None:
        kinds = find_regions(reference)
        self._reference = dict(reference.named_modules())
        self._candidate = {
            name: module
            for name, module in candidate.named_modules()
            if name in kinds or (name and next(module.children(), None) is None)
        }
        self._outputs: dict[str, torch.Tensor] = {}
        self._own: dict[str, torch.Tensor] = {}
        self._accumulated: dict[str, torch.Tensor] = {}
        self._not_measured: dict[str, str] = {}

    @contextmanager
    def of_reference(self) -> Iterator[None]:
        """Context manager around the reference's pass, which comes first."""
        with self._hooks(self._reference, self._keep):
            yield

    @contextmanager
    def of_candidate(self) -> Iterator[None]:
        """Context manager around the candidate's pass."""
        with self._hooks(self._candidate, self._compare):
            yield

    def measured(self) -> dict[str, Any]:
        """{"order", "own_error", "output_error", "not_measured"}; relative L2 errors.

        order: modules in the order of execution. inf where a value is not finite or only the reference is zero.
        """
        return {
            "order": list(self._own),
            "own_error": {name: relative(*squares.tolist()) ** 0.5 for name, squares in self._own.items()},
            "output_error": {name: relative(*squares.tolist()) ** 0.5 for name, squares in self._accumulated.items()},
            "not_measured": self._not_measured,
        }

    @contextmanager
    def _hooks(self, modules: dict[str, torch.nn.Module], callback: Any) -> Iterator[None]:
        def hook(name: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
            # outside the context in which transformers collects outputs of the run's modules
            Context().run(callback, name, args, kwargs, _first(output))

        with ExitStack() as stack:
            for name in self._candidate:
                stack.enter_context(modules[name].register_forward_hook(partial(hook, name), with_kwargs=True))
            yield

    @torch.no_grad()
    def _keep(self, name: str, args: Any, kwargs: Any, output: torch.Tensor | None) -> None:
        if output is not None and name not in self._outputs:  # neither later micro-batches nor a recomputation
            self._outputs[name] = _sampled(output).float().clone()

    @_disable_current_modes()  # a block that keeps its matmuls' results must not count these
    @torch.no_grad()
    def _compare(self, name: str, args: Any, kwargs: Any, output: torch.Tensor | None) -> None:
        if output is None or name in self._own or name in self._not_measured:
            return
        try:
            with torch.autocast(output.device.type, enabled=False):
                exact = _first(self._reference[name](*_in_fp32(args), **_in_fp32(kwargs)))
        except Exception as error:  # a module whose inputs cannot be converted is left out, by name
            self._not_measured[name] = one_line(error, 200)
            return
        if exact is None or exact.shape != output.shape or name not in self._outputs:
            self._not_measured[name] = "its outputs cannot be compared"
            return
        self._own[name] = _squares(output, exact)
        self._accumulated[name] = _squares(_sampled(output), self._outputs[name])


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
