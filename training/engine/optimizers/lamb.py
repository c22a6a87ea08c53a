"""LAMB (You et al. 2020, Algorithm 2): Adam's direction, scaled to the norm of each whole parameter."""

from typing import Any

import torch

from config.optimizers import OPTIMIZERS
from training.engine.flat_optimizer import WholeParameterOptimizer
from training.engine.optimizers.adamw import averages_after as after
from training.engine.optimizers.rule import UpdateInputs, adam_averages, advance_adam

__all__ = ["after", "build", "update"]


class Lamb(WholeParameterOptimizer):
    """A layer in the paper is one parameter here; its norms are summed over the ranks that share it."""

    def update_flat(self, flat: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = advance_adam(flat, state, group, OPTIMIZERS["lamb"].states)
        direction = first.div_(second.sqrt_().add_(group["eps"])).add_(flat, alpha=group["weight_decay"])
        own = self.pieces.of(flat)
        weights, directions = (
            self.pieces.sums(((p, p.of(x).double().square().sum()) for p in own), flat).sqrt_()
            for x in (flat, direction)
        )
        ratios = torch.where((weights > 0) & (directions > 0), weights / directions, 1.0).float()
        for piece in own:
            piece.of(flat).sub_(piece.of(direction) * (group["lr"] * ratios[piece.row]))


build = Lamb.build


def update(given: UpdateInputs) -> torch.Tensor:
    """Algorithm 2 of the paper, its function of the weights' norm being the identity; a zero norm counts as 1."""
    first, second = adam_averages(given)
    direction = first / (second.sqrt() + given.section.eps) + given.weight_decay * given.master
    weights, directions = given.master.norm(), direction.norm()
    ratio = weights / directions if weights > 0 and directions > 0 else 1.0
    return -given.lr * ratio * direction
