"""Faults on purpose: what a test or a game day asks for in `faults:`, struck at exactly one step, rank and module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from config.errors import UserError
from config.schema import Fault


class Faults:
    """The faults of one rank. Costs nothing on a step that has none."""

    def __init__(self, faults: Sequence[Fault], *, rank: int, model: torch.nn.Module) -> None:
        """Raises UserError when a fault names a module that does not exist or has no parameters."""
        self._targets = [(fault, _target(fault, model)) for fault in faults]
        self._rank = rank

    def due(self, step: int) -> list[Fault]:
        """The faults of this step, on any rank."""
        return [fault for fault, _ in self._targets if fault.step == step]

    @contextmanager
    def armed(self, step: int) -> Iterator[None]:
        """Strike in the backward passes inside, if this is the step and the rank."""
        handles = [
            parameter.register_hook(_spoil(float("inf") if fault.kind == "inf_gradient" else float("nan")))
            for fault, parameter in self._targets
            if fault.step == step and fault.rank == self._rank
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _target(fault: Fault, model: torch.nn.Module) -> torch.nn.Parameter:
    for name, module in model.named_modules():
        if fault.module is None or name == fault.module:
            for parameter in module.parameters(recurse=fault.module is not None):
                return parameter
    raise UserError(f"faults: module = {fault.module}: the model has no such module with parameters")


def _spoil(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        spoiled = gradient.clone()
        spoiled.view(-1)[0] = value
        return spoiled

    return hook
