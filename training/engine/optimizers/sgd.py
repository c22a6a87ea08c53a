"""Stochastic gradient descent with momentum (Polyak 1964), as torch writes it: weight decay is part of the gradient."""

from typing import Any

import torch

from config.optimizers import settings_of
from training.engine.optimizers.rule import UNIT, UpdateInputs


def build(groups: list[dict[str, Any]], options: dict[str, Any], *, offload_to_host: bool) -> torch.optim.Optimizer:
    """torch's fused SGD."""
    return torch.optim.SGD(groups, fused=True, **options)


def update(given: UpdateInputs) -> torch.Tensor:
    """v <- momentum v + (g + decay w); w <- w - lr v."""
    (velocity,), momentum = given.states, settings_of(given.section)["momentum"]
    return -given.lr * (momentum * velocity + given.gradient + given.weight_decay * given.master)


def after(given: UpdateInputs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Master and velocity after the step, FP64, and how far a computation in FP32 may be from each."""
    (velocity,) = given.states
    moved, master = update(given), given.master + update(given)
    parts = velocity.abs() + given.gradient.abs() + given.weight_decay * given.master.abs()
    slack = 2 * UNIT * (given.master.abs() + master.abs()) + 8 * UNIT * given.lr * parts
    return [master, -moved / given.lr if given.lr else velocity], [slack, 8 * UNIT * parts]
