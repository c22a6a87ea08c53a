"""The inputs of every optimizer's rule, and the averages of Adam, which several rules start with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from config.optimizers import COUNT
from config.schema import OptimizerSection

UNIT = 2.0**-24
"""Unit round-off of FP32."""


@dataclass(frozen=True)
class UpdateInputs:
    """One parameter before a step. All tensors have its shape; FP64."""

    master: torch.Tensor
    gradient: torch.Tensor
    """Unscaled and clipped."""
    states: Sequence[torch.Tensor]
    """State tensors in the order of `OptimizerSpec.states_of`."""
    section: OptimizerSection
    weight_decay: float
    lr: float
    step: int
    """Number of this step, from 1."""
    matrix: bool
    """Whether it is a hidden matrix, which some optimizers treat differently."""

    def __post_init__(self) -> None:
        for name in ("master", "gradient"):
            object.__setattr__(self, name, getattr(self, name).double())
        object.__setattr__(self, "states", [state.double() for state in self.states])


def adam_averages(given: UpdateInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(first, second) moments after the step, corrected for their start at zero (Kingma and Ba 2015, Algorithm 1)."""
    (first, second), (beta1, beta2), g = given.states, given.section.betas, given.gradient
    first = (beta1 * first + (1 - beta1) * g) / (1 - beta1**given.step)
    second = (beta2 * second + (1 - beta2) * g.square()) / (1 - beta2**given.step)
    return first, second


def advance_adam(
    flat: torch.Tensor, state: dict[str, Any], group: dict[str, Any], keys: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance a flat tensor's FP32 state by its gradient; returns new, corrected averages. keys: of both in `state`."""
    first, second = keys
    beta1, beta2 = group["betas"]
    if not state:
        state[COUNT] = 0
        state[first], state[second] = torch.zeros_like(flat), torch.zeros_like(flat)
    state[COUNT] += 1
    state[first].lerp_(flat.grad, 1 - beta1)
    state[second].mul_(beta2).addcmul_(flat.grad, flat.grad, value=1 - beta2)
    return state[first].div(1 - beta1 ** state[COUNT]), state[second].div(1 - beta2 ** state[COUNT])
