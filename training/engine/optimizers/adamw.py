"""AdamW (Loshchilov and Hutter 2019): decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from config.schema import OptimizerSection
from training.engine.ops import load_op


def build(groups: list[dict[str, Any]], options: dict[str, Any], *, offload_to_host: bool) -> torch.optim.Optimizer:
    """DeepSpeed's CPU kernel when a GPU run offloads its state, else torch's fused one.

    On a CPU torch's fused AdamW is as fast as DeepSpeed's and needs no build.
    """
    if offload_to_host:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        load_op("CPUAdamBuilder", "zero_optimization.offload_optimizer")
        return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


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
    """Algorithm 2 of the paper, the schedule inside `lr`."""
    first, second = (state.double() for state in states)
    beta1, beta2 = section.betas
    g, w = gradient.double(), master.double()
    first = beta1 * first + (1 - beta1) * g
    second = beta2 * second + (1 - beta2) * g.square()
    corrected = first / (1 - beta1**step)
    spread = second.div(1 - beta2**step).sqrt().add(section.eps)
    return -lr * (weight_decay * w + corrected / spread)
