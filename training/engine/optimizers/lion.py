"""Lion (Chen et al. 2023, Algorithm 2): the sign of a mix of the gradient and its average, decoupled weight decay."""

from typing import Any

import torch

from config.optimizers import OPTIMIZERS
from training.engine.flat_optimizer import FlatOptimizer
from training.engine.optimizers.rule import UNIT, UpdateInputs

(AVERAGE,) = OPTIMIZERS["lion"].states


class Lion(FlatOptimizer):
    """Elementwise, so it may be given any piece of any parameter: three passes over the values."""

    def update_flat(self, flat: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert flat.grad is not None
        (mix, decay), rate = group["betas"], group["lr"]
        if not state:
            state[AVERAGE] = torch.zeros_like(flat)
        direction = state[AVERAGE].lerp(flat.grad, 1 - mix).sign_()
        flat.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate)
        state[AVERAGE].lerp_(flat.grad, 1 - decay)


build = Lion.build


def update(given: UpdateInputs) -> torch.Tensor:
    """Algorithm 2 of the paper."""
    (average,), (mix, _) = given.states, given.section.betas
    direction = (mix * average + (1 - mix) * given.gradient).sign()
    return -given.lr * (direction + given.weight_decay * given.master)


def after(given: UpdateInputs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Master and average after the step, FP64, and how far a computation in FP32 may be from each."""
    (average,), (mix, decay) = given.states, given.section.betas
    size = average.abs() + given.gradient.abs()
    mixed, master = mix * average + (1 - mix) * given.gradient, given.master + update(given)
    slack = 4 * UNIT * (given.master.abs() + master.abs() + given.lr)
    # where the mix is zero within rounding, either sign is right
    slack = torch.where(mixed.abs() <= 8 * UNIT * size, slack + 2 * given.lr, slack)
    return [master, decay * average + (1 - decay) * given.gradient], [slack, 8 * UNIT * size]
