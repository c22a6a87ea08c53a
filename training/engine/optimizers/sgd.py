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
    return -given.lr * _velocity(given)


def after(given: UpdateInputs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Master and velocity after the step, FP64, and how far a computation in FP32 may be from each."""
    (velocity,), moved, master = given.states, _velocity(given), given.master + update(given)
    parts = velocity.abs() + given.gradient.abs() + given.weight_decay * given.master.abs()
    slack = 2 * UNIT * (given.master.abs() + master.abs()) + 8 * UNIT * given.lr * parts
    kept = moved if settings_of(given.section)["momentum"] else velocity  # without momentum torch keeps none
    return [master, kept], [slack, 8 * UNIT * parts]


def _velocity(given: UpdateInputs) -> torch.Tensor:
    (velocity,), momentum = given.states, settings_of(given.section)["momentum"]
    return momentum * velocity + given.gradient + given.weight_decay * given.master
