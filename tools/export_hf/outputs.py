"""Error of each module's output relative to FP32: its own, and together with those of the modules before it.

For the *own error* the FP32 module is called on the candidate's inputs, converted to FP32, and both outputs are
compared at once, so nothing is stored. The *output error* needs FP32's outputs from its own pass; at most SAMPLE values
of each, evenly spread, are kept. Inside a step of a run `tools.parity.signature` measures more.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
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


def output_errors(
    reference: torch.nn.Module,
    candidate: torch.nn.Module,
    run_reference: Callable[[], Any],
    run_candidate: Callable[[], Any],
) -> dict[str, tuple[float, float]]:
    """(own error, output error) of the modules that a reference in FP32 and a candidate share, in the order of
    execution: relative L2 errors, inf where a value is not finite or only the reference is zero.

    run_reference, run_candidate: make a pass of each; the first call of a module counts.
    """
    kinds, exact_modules = find_regions(reference), dict(reference.named_modules())
    shared = {
        name: module
        for name, module in candidate.named_modules()
        if name in kinds or (name and next(module.children(), None) is None)
    }
    outputs: dict[str, torch.Tensor] = {}
    errors: dict[str, tuple[float, float]] = {}

    @torch.no_grad()
    def keep(name: str, args: Any, kwargs: Any, output: torch.Tensor | None) -> None:
        if output is not None and name not in outputs:  # neither later micro-batches nor a recomputation
            outputs[name] = _sampled(output).float().clone()

    @_disable_current_modes()  # a block that keeps its matmuls' results must not count these
    @torch.no_grad()
    def compare(name: str, args: Any, kwargs: Any, output: torch.Tensor | None) -> None:
        kept = outputs.pop(name, None)
        if output is None or kept is None:
            return
        exact = None
        with suppress(Exception), torch.autocast(output.device.type, enabled=False):  # some inputs cannot be converted
            args, kwargs = map_floats(torch.Tensor.float, (args, kwargs))
            exact = _first(exact_modules[name](*args, **kwargs))
        if exact is not None and exact.shape == output.shape:
            errors[name] = Apart([(output, exact)]).error, Apart([(_sampled(output), kept)]).error

    for modules, see, run in ((exact_modules, keep, run_reference), (shared, compare, run_candidate)):
        with ExitStack() as hooks:
            for name in shared:
                hooks.enter_context(modules[name].register_forward_hook(partial(_hook, see, name), with_kwargs=True))
            run()
    return errors


def _hook(see: Callable[..., None], name: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
    # outside the context in which transformers collects outputs of the run's modules
    Context().run(see, name, args, kwargs, _first(output))


def _first(output: Any) -> torch.Tensor | None:
    """The first floating tensor of a module's output."""
    return next((tensor for tensor in tensors_of(output) if tensor.is_floating_point()), None)


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)]
