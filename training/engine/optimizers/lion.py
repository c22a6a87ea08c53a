"""Lion (Chen et al. 2023, Algorithm 2): the sign of a mix of the gradient and its average, decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from config.optimizers import OPTIMIZERS
from config.schema import OptimizerSection

(AVERAGE,) = OPTIMIZERS["lion"].states


class Lion(torch.optim.Optimizer):
    """Elementwise, so it may be given any piece of any parameter."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            (mix, decay), rate = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state[AVERAGE] = torch.zeros_like(parameter)
                direction = state[AVERAGE].lerp(parameter.grad, 1 - mix).sign_()
                parameter.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate)
                state[AVERAGE].lerp_(parameter.grad, 1 - decay)


def build(groups: list[dict[str, Any]], options: dict[str, Any], *, offload_to_host: bool) -> torch.optim.Optimizer:
    """The same on every device: three passes over the values."""
    return Lion(groups, options)


def update(
    master: torch.Tensor,
    gradient: torch.Tensor,
    states: Sequence[torch.Tensor],
    *,
    section: OptimizerSection,
    weight_decay: float,
    lr: float,
    step: int,
) -> torch.Tensor:
    """Algorithm 2 of the paper."""
    (average,) = (state.double() for state in states)
    mix, _ = section.betas
    direction = (mix * average + (1 - mix) * gradient.double()).sign()
    return -lr * (direction + weight_decay * master.double())
