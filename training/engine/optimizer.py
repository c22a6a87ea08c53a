"""The optimizer on the FP32 masters: which one the config names, built for this model."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from deepspeed.runtime import compiler
from transformers import PreTrainedModel

from config.optimizers import OPTIMIZERS
from config.schema import OptimizerSection
from modeling.parameter_groups import parameter_groups


class Implementation(Protocol):
    """What a module of training/engine/optimizers/ defines."""

    def build(
        self, groups: list[dict[str, Any]], options: dict[str, Any], *, offload_to_host: bool
    ) -> torch.optim.Optimizer:
        """The optimizer of these parameter groups.

        options: `lr` and its settings, as torch calls them. offload_to_host: a GPU run keeps its masters and its state
        in host memory.
        """

    def update(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        states: Sequence[torch.Tensor],
        *,
        section: OptimizerSection,
        weight_decay: float,
        lr: float,
        step: int,
    ) -> torch.Tensor:
        """The change of `master`, FP64, computed without torch's optimizer.

        gradient: unscaled and clipped. states: before the step, in the order of `OptimizerSpec.states`. step: from 1.
        All tensors of one shape.
        """


def implementation(name: str) -> Implementation:
    """The module of an optimizer."""
    return cast(Implementation, import_module(f"training.engine.optimizers.{name}"))


def build_optimizer(
    model: PreTrainedModel, section: OptimizerSection, *, offload: bool, device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer that the config names, with and without weight decay as two groups."""
    groups = parameter_groups(model, weight_decay=section.weight_decay)
    options = {"lr": section.learning_rate}
    options |= {key: getattr(section, key) for key in OPTIMIZERS[section.name].settings}
    return implementation(section.name).build(groups, options, offload_to_host=offload and device.type == "cuda")


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon without `torch.compile`, before its ZeRO stages do, whatever the optimizer is.

    Compiling its kernels imports all of torch's compiler, in the first step of every run: 1.3 s of CPU time of each
    process of a small Llama's start (python -X importtime). Mantissa never calls it.
    """
    compile_, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = compile_
