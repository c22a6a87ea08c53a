"""The optimizer on the FP32 masters: the one that the config names, built for this model."""

from collections.abc import Callable
from typing import Any, Protocol
from unittest.mock import patch

import torch
from deepspeed.runtime import compiler
from transformers import PreTrainedModel

from config.optimizers import settings_of
from config.schema import OptimizerSection
from modeling.parameter_groups import parameter_groups
from training.engine.optimizers import adamw, lamb, lion, muon, sgd, stable_adamw
from training.engine.optimizers.rule import UpdateInputs
from training.engine.split_masters import SplitAdamW


class Implementation(Protocol):
    """The interface of a module in training/engine/optimizers/."""

    def build(
        self, groups: list[dict[str, Any]], options: dict[str, Any], *, offload_to_host: bool
    ) -> torch.optim.Optimizer:
        """The optimizer of these `modeling.parameter_groups`. options: `lr` and its settings, under torch's names.
        offload_to_host: a GPU run keeps masters and state in host memory."""

    def update(self, given: UpdateInputs) -> torch.Tensor:
        """The change of one parameter's master, FP64 and in its shape, computed without torch's optimizer."""

    def after(self, given: UpdateInputs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Master and state of some values after the step, FP64, and how far a computation in FP32 may be from each: inf
        for a master that these values alone do not determine. Not called for hidden matrices with their own rule."""


IMPLEMENTATIONS: dict[str, Implementation] = {
    "adamw": adamw,
    "lamb": lamb,
    "lion": lion,
    "muon": muon,
    "sgd": sgd,
    "stable_adamw": stable_adamw,
}


def rounding(name: str, given: UpdateInputs) -> float:
    """A bound, as a norm, on the distance from `update` that roundings below FP32 cause; 0.0 if there are none."""
    own: Callable[[UpdateInputs], float] | None = getattr(IMPLEMENTATIONS[name], "rounding", None)
    return 0.0 if own is None else own(given)


def build_optimizer(
    model: PreTrainedModel, section: OptimizerSection, *, offload: bool, device: torch.device, masters: str = "fp32"
) -> torch.optim.Optimizer:
    """The optimizer that the config names. masters: precision.masters, which is split for AdamW alone."""
    options = {"lr": section.learning_rate, **settings_of(section)}
    groups = parameter_groups(model, section)
    if masters == "split":
        return SplitAdamW(groups, options)
    return IMPLEMENTATIONS[section.name].build(groups, options, offload_to_host=offload and device.type == "cuda")


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon without `torch.compile` before its ZeRO stages do. Compiling its kernels, which Mantissa
    does not use, takes 1.3 s of CPU time per process in the first step of every run (python -X importtime)."""
    with patch.object(compiler, "compile", lambda: compiler.dummy_decorator):
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
