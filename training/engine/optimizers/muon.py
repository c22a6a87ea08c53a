"""Muon (Jordan et al. 2024): hidden matrices move along the nearest orthogonal matrix to their averaged gradient.

Steps have weight decay and AdamW's size (Liu et al. 2025, "Muon is Scalable for LLM Training", equation 4).
"""

from typing import Any

import torch

from config.optimizers import COUNT, OPTIMIZERS, settings_of
from training.engine.flat_optimizer import WholeParameterOptimizer
from training.engine.optimizers.adamw import after
from training.engine.optimizers.rule import UpdateInputs, adam_averages, advance_adam

__all__ = ["after", "build", "update"]

(AVERAGE,) = OPTIMIZERS["muon"].states_of(matrix=True)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic; singular values end up between about 0.7 and 1.2."""
ITERATIONS = 5
RMS = 0.2
"""Root mean square of an update, as AdamW's typically is (section 2.2 of Liu et al.)."""


class Muon(WholeParameterOptimizer):
    """Each whole matrix, one per expert if experts are fused, is computed by one of the ranks that share it."""

    def update_flat(self, flat: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert flat.grad is not None
        rate = group["lr"]
        if group["matrix"]:
            if not state:
                state[COUNT], state[AVERAGE] = 0, torch.zeros_like(flat)
            state[COUNT] += 1
            state[AVERAGE].lerp_(flat.grad, 1 - group["momentum"])
            direction = flat.grad.lerp(state[AVERAGE], group["momentum"])
            bf16 = group["orthogonalization"] == "bf16"
            direction = self.pieces.replace_matrices(flat, direction, lambda matrix: step_of(matrix, bf16=bf16))
        else:
            first, second = advance_adam(flat, state, group, OPTIMIZERS["muon"].states)
            direction = first.div_(second.sqrt_().add_(group["eps"]))
        flat.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate)


def step_of(direction: torch.Tensor, *, bf16: bool) -> torch.Tensor:
    """(m, n) nearest orthogonal matrix, with RMS of about 0.2 whatever the shape; in the dtype of `direction`."""
    x = direction.bfloat16() if bf16 else direction
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / (x.norm() + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    x = x.mT if tall else x
    return x.to(direction.dtype) * (RMS * max(direction.shape) ** 0.5)


build = Muon.build


def update(given: UpdateInputs) -> torch.Tensor:
    """Equation 4 of Liu et al. for a matrix, or each of fused experts, with Nesterov's momentum; else AdamW's rule."""
    if given.matrix:
        direction = _orthogonalized(given, bf16=settings_of(given.section)["orthogonalization"] == "bf16")
    else:
        first, second = adam_averages(given)
        direction = first / (second.sqrt() + given.section.eps)
    return -given.lr * (direction + given.weight_decay * given.master)


def rounding(given: UpdateInputs) -> float:
    """A bound, as a norm, on the distance of a BF16 iteration from `update`, which rounds differently; 0.0 in FP32.

    Two that start one FP32 rounding apart are as far from each other as from the iteration in FP64, unless the
    direction has very low rank: BF16's roundings are then amplified until they are most of the step. Measured on random
    matrices of full and of low rank, 8 to 512 wide: up to 1.1 of that distance, or 0.15 of the step.
    """
    if not given.matrix or settings_of(given.section)["orthogonalization"] != "bf16":
        return 0.0
    step = _orthogonalized(given, bf16=True)
    error = step - _orthogonalized(given, bf16=False)
    return given.lr * min(2.0 * float(error.norm()), 0.3 * float(step.norm()))


def _orthogonalized(given: UpdateInputs, *, bf16: bool) -> torch.Tensor:
    momentum, (average,) = settings_of(given.section)["momentum"], given.states
    average = momentum * average + (1 - momentum) * given.gradient
    direction = momentum * average + (1 - momentum) * given.gradient
    matrices = direction.view(-1, *direction.shape[-2:])
    return torch.stack([step_of(matrix, bf16=bf16) for matrix in matrices]).view(direction.shape)
