"""StableAdamW (Wortsman et al. 2023, Algorithm 2): AdamW that slows down where the second moment lags behind.

A parameter whose gradients grow faster than their average takes smaller steps, instead of the spike that AdamW makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from config.optimizers import COUNT, OPTIMIZERS
from config.schema import OptimizerSection
from training.engine.pieces import WholeParameterOptimizer

FIRST, SECOND = OPTIMIZERS["stable_adamw"].states


class StableAdamW(WholeParameterOptimizer):
    """The mean over a whole parameter is summed over the ranks that share it."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. A collective above ZeRO-0."""
        for group in self.param_groups:
            (beta1, beta2), eps = group["betas"], group["eps"]
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
                second = state[SECOND].div(1 - beta2 ** state[COUNT])
                own = self.pieces.of(flat)
                surprise = flat.grad.square().div_(second.clamp(min=eps**2))
                sums = self.pieces.sums(((piece, piece.of(surprise).double().sum()) for piece in own), flat)
                direction = state[FIRST].div(1 - beta1 ** state[COUNT]).div_(second.sqrt_().add_(eps))
                direction.add_(flat, alpha=group["weight_decay"])
                for piece in own:
                    slower = (sums[piece.row] / piece.numel).sqrt().clamp(min=1.0).float()
                    piece.of(flat).sub_(piece.of(direction) * (group["lr"] / slower))


def build(groups: list[dict[str, Any]], options: dict[str, Any], *, offload_to_host: bool) -> torch.optim.Optimizer:
    """The same on every device."""
    return StableAdamW(groups, options)


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
    """Algorithm 2 of the paper; its corrected averages are Adam's."""
    first, second = (state.double() for state in states)
    beta1, beta2 = section.betas
    g, w = gradient.double(), master.double()
    first = (beta1 * first + (1 - beta1) * g) / (1 - beta1**step)
    second = (beta2 * second + (1 - beta2) * g.square()) / (1 - beta2**step)
    surprise = (g.square() / second.clamp(min=section.eps**2)).mean().sqrt()
    rate = lr / surprise.clamp(min=1.0)
    return -rate * (first / (second.sqrt() + section.eps) + weight_decay * w)
