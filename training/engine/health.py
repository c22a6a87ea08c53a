"""What a step says about itself: on this rank, on all ranks, and after the optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from training.loss_scaler import ScaleChange


@dataclass(frozen=True)
class Outcome:
    """What forward and backward of one step left behind on this rank."""

    loss_sum: torch.Tensor
    """() float64: summed loss of this rank's labels, in nats."""
    label_tokens: torch.Tensor
    """() float64: labels that count, over all ranks."""


@dataclass(frozen=True)
class Health:
    """The same on every rank."""

    loss: float
    """Raw mean loss over the global batch, in nats per label token; inf or nan if it is."""
    memory_bytes: int
    """Peak memory of the rank that needs most: device memory, or resident memory on a CPU."""
    by_rank: dict[str, Any]
    """`memory_bytes` (the same measure) and `work_seconds` (data wait and forward passes), each as
    `training.engine.work_time.by_rank` gives it."""
    grad_norm: float
    """Global norm of the unscaled gradient before clipping; inf when any value is not finite."""
    preempted: bool
    """Some rank was asked to stop."""
    save_ended: bool
    """A checkpoint that was being written has come to its end on every rank."""

    @property
    def loss_is_finite(self) -> bool:
        """Whether the loss is neither inf nor nan."""
        return math.isfinite(self.loss)

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are."""
        return self.loss_is_finite and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Update:
    """What an optimizer step did."""

    applied: bool
    """Whether the weights changed."""
    clip_coefficient: float
    """Factor that clipping applied to the gradient, 1 where it did not clip, 0 on a skipped step."""
    lr: float
    """Learning rate of this step."""
    loss_scale: float
    """Loss scale this step ran at; 1 where nothing is scaled."""
    scale_change: ScaleChange | None
    """How the scale changed afterwards."""


class RanksDisagree(RuntimeError):
    """Ranks hold different values of what must be one; training on would let their weights part without a word."""


def require_equal(what: str, values: list[float]) -> None:
    """values: by rank. NaN never appears among them."""
    odd = [f"rank {rank} has {value!r}" for rank, value in enumerate(values) if value != values[0]]
    if odd:
        raise RanksDisagree(f"{what} differs between ranks: rank 0 has {values[0]!r}, {', '.join(odd)}")
