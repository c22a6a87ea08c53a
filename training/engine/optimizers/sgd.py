"""Stochastic gradient descent with momentum (Polyak 1964), as torch writes it: weight decay is part of the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from config.schema import OptimizerSection


def build(groups: list[dict[str, Any]], options: dict[str, Any], *, offload_to_host: bool) -> torch.optim.Optimizer:
    """torch's, fused."""
    return torch.optim.SGD(groups, fused=True, **options)


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
    """v <- momentum v + (g + decay w); w <- w - lr v."""
    (velocity,) = (state.double() for state in states)
    return -lr * (section.momentum * velocity + gradient.double() + weight_decay * master.double())
