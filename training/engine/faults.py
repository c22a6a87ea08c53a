"""Fault injection: `faults:` of the config, each at exactly one step, rank and module.

A fault is injected into the last micro-batch of its step, and again when that step is rerun for attribution or replayed
from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from config.errors import UserError
from config.schema import Fault


class Faults:
    """The faults of one rank. Costs nothing on a step that has none."""

    def __init__(self, faults: Sequence[Fault], *, rank: int, model: torch.nn.Module) -> None:
        """Raises UserError when a fault names a module that does not exist or has no parameters."""
        self._targets = [(fault, *_target(fault, model)) for fault in faults]
        self._rank = rank

    def due(self, step: int) -> list[Fault]:
        """The faults of this step, on any rank."""
        return [fault for fault, _, _ in self._targets if fault.step == step]

    @contextmanager
    def injected(self, step: int) -> Iterator[None]:
        """Inject faults into activations and gradients of the passes inside, if this is their step and rank."""
        with ExitStack() as stack:
            for fault, module, parameters in self._due_here(step):
                for handle in _inject(fault, module, parameters):
                    stack.callback(handle.remove)
            yield

    def corrupt_loss(self, step: int, loss: torch.Tensor) -> torch.Tensor:
        """The loss of the last micro-batch, with the faults of this step and rank applied."""
        for fault, _, _ in self._due_here(step):
            if fault.kind == "nan_loss":
                loss = loss * float("nan")
            elif fault.kind == "loss_spike":
                loss = loss * fault.factor
        return loss

    def _due_here(self, step: int) -> list[tuple[Fault, torch.nn.Module, list[torch.nn.Parameter]]]:
        return [target for target in self._targets if target[0].step == step and target[0].rank == self._rank]


def _inject(fault: Fault, module: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> list[Any]:
    if fault.kind == "inf_gradient":
        return [parameters[0].register_hook(_overwrite(float("inf")))]
    if fault.kind == "nan_gradient":
        return [parameters[0].register_hook(_overwrite(float("nan")))]
    if fault.kind == "gradient_spike":
        return [parameter.register_hook(lambda gradient: gradient * fault.factor) for parameter in parameters]
    if fault.kind == "nan_activation":
        nan = _overwrite(float("nan"))
        # the first of all hooks, so that observers of the module see what its callers see
        return [module.register_forward_hook(lambda module, inputs, output: _corrupt_first(output, nan), prepend=True)]
    return []


def _corrupt_first(output: Any, corrupt: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A module's output with its first tensor corrupted."""
    if isinstance(output, torch.Tensor):
        return corrupt(output)
    return (corrupt(output[0]), *output[1:])


def _target(fault: Fault, model: torch.nn.Module) -> tuple[torch.nn.Module, list[torch.nn.Parameter]]:
    for name, module in model.named_modules():
        whole = fault.module is not None or fault.kind == "gradient_spike"
        parameters = [parameter for parameter in module.parameters(recurse=whole) if parameter.requires_grad]
        if not parameters and fault.module == name and fault.kind == "nan_activation":
            return module, []  # a frozen module has activations too
        if parameters and fault.module in (None, name):
            return module, parameters
    raise UserError(f"faults: module = {fault.module}: the model has no such module with parameters")


def _overwrite(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def corrupt(tensor: torch.Tensor) -> torch.Tensor:
        corrupted = tensor.clone()
        corrupted.view(-1)[0] = value
        return corrupted

    return corrupt
