"""StableAdamW (Wortsman et al. 2023, Algorithm 2): AdamW that slows down where the second moment lags behind."""

from typing import Any

import torch

from config.optimizers import OPTIMIZERS
from training.engine.flat_optimizer import WholeParameterOptimizer
from training.engine.optimizers.adamw import averages_after as after
from training.engine.optimizers.rule import UpdateInputs, adam_averages, advance_adam

__all__ = ["after", "build", "update"]


class StableAdamW(WholeParameterOptimizer):
    """The mean over a whole parameter is summed over the ranks that share it."""

    def update_flat(self, flat: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert flat.grad is not None
        first, second = advance_adam(flat, state, group, OPTIMIZERS["stable_adamw"].states)
        own, eps = self.pieces.of(flat), group["eps"]
        surprise = flat.grad.square().div_(second.clamp(min=eps**2))
        sums = self.pieces.sums(((piece, piece.of(surprise).double().sum()) for piece in own), flat)
        direction = first.div_(second.sqrt_().add_(eps)).add_(flat, alpha=group["weight_decay"])
        for piece in own:
            slower = (sums[piece.row] / piece.numel).sqrt().clamp(min=1.0).float()
            piece.of(flat).sub_(piece.of(direction) * (group["lr"] / slower))


build = StableAdamW.build


def update(given: UpdateInputs) -> torch.Tensor:
    """Algorithm 2 of the paper; its corrected averages are Adam's."""
    first, second = adam_averages(given)
    surprise = (given.gradient.square() / second.clamp(min=given.section.eps**2)).mean().sqrt()
    rate = given.lr / surprise.clamp(min=1.0)
    return -rate * (first / (second.sqrt() + given.section.eps) + given.weight_decay * given.master)
