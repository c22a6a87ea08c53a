"""Stochastic gradient descent with momentum (Polyak 1964), as torch writes it: weight decay is part of the gradient."""

from typing import Any

import torch

from config.optimizers import settings_of
from training.engine.optimizers.rule import UpdateInputs


def build(groups: list[dict[str, Any]], options: dict[str, Any], *, offload_to_host: bool) -> torch.optim.Optimizer:
    """torch's, fused."""
    return torch.optim.SGD(groups, fused=True, **options)


def update(given: UpdateInputs) -> torch.Tensor:
    """v <- momentum v + (g + decay w); w <- w - lr v."""
    (velocity,) = given.states
    return -given.lr * (
        settings_of(given.section)["momentum"] * velocity + given.gradient + given.weight_decay * given.master
    )
