"""AdamW (Loshchilov and Hutter 2019): decoupled weight decay."""

from __future__ import annotations

from typing import Any

import torch

from training.engine.ops import load_op
from training.engine.optimizers.rule import UpdateInputs, adam_averages


def build(groups: list[dict[str, Any]], options: dict[str, Any], *, offload_to_host: bool) -> torch.optim.Optimizer:
    """DeepSpeed's CPU kernel when a GPU run offloads its state, else torch's fused one.

    On a CPU torch's fused AdamW is as fast as DeepSpeed's and needs no build.
    """
    if offload_to_host:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        load_op("CPUAdamBuilder", "zero_optimization.offload_optimizer")
        return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


def update(given: UpdateInputs) -> torch.Tensor:
    """Algorithm 2 of the paper, the schedule inside `lr`."""
    first, second = adam_averages(given)
    return -given.lr * (given.weight_decay * given.master + first / (second.sqrt() + given.section.eps))
