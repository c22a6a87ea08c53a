"""Error of each module's output relative to FP32: its own, and together with those of the modules before it.

For the *own error* the FP32 module is called on the candidate's inputs, converted to FP32, and both outputs are
compared at once, so nothing is stored. The *output error* needs FP32's outputs from its own pass; at most SAMPLE values
of each, evenly spread, are kept. Inside a step of a run `tools.parity.signature` measures more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import Context
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from precision.findings import tensors_of
from precision.manifest import find_regions
from tools.parity.plain import Apart
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
        self._not_comparable: set[str] = set()
        self.own_error: dict[str, float] = {}
        """Relative L2 own error by module, in the order of execution; inf where a value is not finite or only the
        reference is zero."""
        self.output_error: dict[str, float] = {}
        """The same of the output error."""

    def of_reference(self) -> AbstractContextManager[None]:
        """Context manager around the reference's pass, which comes first."""
        return self._hooks(self._reference, self._keep)

    def of_candidate(self) -> AbstractContextManager[None]:
        """Context manager around the candidate's pass."""
        return self._hooks(self._candidate, self._compare)

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
        if output is None or name in self.own_error or name in self._not_comparable:
            return
        exact = None
        with suppress(Exception), torch.autocast(output.device.type, enabled=False):  # some inputs cannot be converted
            args, kwargs = map_floats(torch.Tensor.float, (args, kwargs))
            exact = _first(self._reference[name](*args, **kwargs))
        if exact is None or exact.shape != output.shape or name not in self._outputs:
            self._not_comparable.add(name)
            return
        self.own_error[name] = Apart([(output, exact)]).error
        self.output_error[name] = Apart([(_sampled(output), self._outputs[name])]).error


def _first(output: Any) -> torch.Tensor | None:
    """The first floating tensor of a module's output."""
    return next((tensor for tensor in tensors_of(output) if tensor.is_floating_point()), None)


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)]
