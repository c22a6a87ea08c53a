"""The optimizer on the FP32 masters."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime import compiler
from transformers import PreTrainedModel

from config.schema import OptimizerSection
from modeling.parameter_groups import parameter_groups


def build_optimizer(
    model: PreTrainedModel, section: OptimizerSection, *, offload: bool, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW on the masters: DeepSpeed's CPU kernel when a GPU run offloads its state, else torch's fused one.

    On a CPU torch's fused AdamW is as fast as DeepSpeed's and needs no build.
    """
    groups = parameter_groups(model, weight_decay=section.weight_decay)
    options: dict[str, Any] = {"lr": section.learning_rate, "betas": section.betas, "eps": section.eps}
    if offload and device.type == "cuda":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon without `torch.compile`, before its ZeRO stages do, whatever the optimizer is.

    Compiling its kernels imports all of torch's compiler, in the first step of every run: 1.3 s of CPU time of each
    process of a small Llama's start (python -X importtime). Mantissa has no Muon.
    """
    compile_, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = compile_
