"""LAMB (You et al. 2020, Algorithm 2): Adam's direction, scaled to the norm of each whole parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from config.optimizers import COUNT, OPTIMIZERS
from config.schema import OptimizerSection
from training.engine.pieces import WholeParameterOptimizer

FIRST, SECOND = OPTIMIZERS["lamb"].states


class Lamb(WholeParameterOptimizer):
    """A layer of the paper is one parameter; its norms are summed over the ranks that share it."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. A collective above ZeRO-0."""
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for flat in group["params"]:
                if flat.grad is None:
                    continue
                state = self.state[flat]
                if not state:
                    state[COUNT] = 0
                    state[FIRST], state[SECOND] = torch.zeros_like(flat), torch.zeros_like(flat)
                state[COUNT] += 1
                state[FIRST].lerp_(flat.grad, 1 - beta1)
                state[SECOND].mul_(beta2).addcmul_(flat.grad, flat.grad, value=1 - beta2)
                spread = state[SECOND].div(1 - beta2 ** state[COUNT]).sqrt_().add_(group["eps"])
                direction = state[FIRST].div(1 - beta1 ** state[COUNT]).div_(spread)
                direction.add_(flat, alpha=group["weight_decay"])
                own = self.pieces.of(flat)
                weights, directions = (
                    self.pieces.sums(((p, p.of(x).double().square().sum()) for p in own), flat).sqrt_()
                    for x in (flat, direction)
                )
                ratios = torch.where((weights > 0) & (directions > 0), weights / directions, 1.0).float()
                for piece in own:
                    piece.of(flat).sub_(piece.of(direction) * (rate * ratios[piece.row]))


def build(groups: list[dict[str, Any]], options: dict[str, Any], *, offload_to_host: bool) -> torch.optim.Optimizer:
    """The same on every device."""
    return Lamb(groups, options)


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
    """Algorithm 2 of the paper, its function of the weights' norm being the identity; a zero norm counts as 1."""
    first, second = (state.double() for state in states)
    beta1, beta2 = section.betas
    g, w = gradient.double(), master.double()
    first = (beta1 * first + (1 - beta1) * g) / (1 - beta1**step)
    second = (beta2 * second + (1 - beta2) * g.square()) / (1 - beta2**step)
    direction = first / (second.sqrt() + section.eps) + weight_decay * w
    weights, directions = w.norm(), direction.norm()
    ratio = weights / directions if weights > 0 and directions > 0 else 1.0
    return -lr * ratio * direction
