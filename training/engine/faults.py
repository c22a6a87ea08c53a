"""Fault injection: `faults:` of the config, each at exactly one step, rank and module.

A fault is injected into the last micro-batch of its step, and again when that step is rerun for attribution or replayed
from a checkpoint; a flipped bit once, unless it persists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from config.errors import UserError
from config.schema import Fault
from training.engine.flips import flipped

_HELD = ("weight", "master", "moment", "second_moment")
"""Places of a flipped bit that are there before the passes."""


class Faults:
    """The faults of one rank. Costs nothing on a step that has none."""

    def __init__(self, faults: Sequence[Fault], *, rank: int, model: torch.nn.Module) -> None:
        """Raises UserError when a fault names a module that does not exist or has no parameters."""
        self._targets = [(fault, *_target(fault, model)) for fault in faults]
        self._rank = rank
        self._struck: set[int] = set()
        self._armed: set[int] = set()
        for fault, _, parameters in self._targets:
            if fault.kind == "flipped_bit" and fault.place == "gradient" and fault.rank == rank:
                # from the start, so that it comes before the hooks of those who look at the gradient
                parameters[0].register_hook(self._flip_of(fault))
        self._stuck: dict[int, bool | None] = {}
        self.flip: Callable[[Fault, torch.nn.Parameter, bool | None], bool | None] = lambda *_: None
        """Flips a bit of what this rank holds of a parameter, or sets it (`training.engine.plant`)."""

    def due(self, step: int) -> list[Fault]:
        """The faults of this step, on any rank."""
        return [fault for fault, _, _ in self._targets if fault.step == step]

    def loses_update(self, step: int) -> bool:
        """Whether a step is not to be applied; the same on all ranks."""
        return any(fault.kind == "lost_update" for fault in self.due(step))

    @contextmanager
    def injected(self, step: int) -> Iterator[None]:
        """Inject faults into activations and gradients of the passes inside, if this is their step and rank."""
        with ExitStack() as stack:
            for fault, module, parameters in self._due_here(step):
                for handle in self._inject(fault, module, parameters):
                    stack.callback(handle.remove)
            yield
            self._armed.clear()

    def strike(self, step: int, *, reduced: bool) -> None:
        """Flip bits of what is held before the passes of a step, or of the gradients `reduced` after them."""
        for fault, _, parameters in self._due_here(step):
            due = fault.place == "collective" if reduced else fault.place in _HELD
            if fault.kind == "flipped_bit" and due and self._strikes(fault):
                # what is computed anew is flipped anew; what is held has a bit that sticks
                self._stuck[id(fault)] = self.flip(
                    fault, parameters[0], None if reduced else self._stuck.get(id(fault))
                )

    def _strikes(self, fault: Fault) -> bool:
        """Whether it strikes now: once, unless it persists."""
        again = id(fault) in self._struck
        self._struck.add(id(fault))
        return fault.persists or not again

    def _flip_of(self, fault: Fault) -> Callable[[torch.Tensor], torch.Tensor | None]:
        return lambda gradient: flipped(gradient, fault.bit) if id(fault) in self._armed else None

    def _inject(self, fault: Fault, module: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> list[Any]:
        if fault.kind != "flipped_bit":
            return _inject(fault, module, parameters)
        if fault.place not in ("gradient", "activation") or not self._strikes(fault):
            return []
        if fault.place == "gradient":
            self._armed.add(id(fault))
            return []
        return [_on_output(module, lambda output: flipped(output, fault.bit))]

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
        return [_on_output(module, _overwrite(float("nan")))]
    return []


def _on_output(module: torch.nn.Module, corrupt: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    # the first of all hooks, so that observers of the module see what its callers see
    return module.register_forward_hook(lambda module, inputs, output: _corrupt_first(output, corrupt), prepend=True)


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
