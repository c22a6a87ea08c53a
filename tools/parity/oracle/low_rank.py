"""An independent implementation of LoRA: W x + factor B A x on a frozen W, without the library peft."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from config.errors import UserError
from config.schema import AdapterSection
from modeling.adapter import as_peft_reads, initial_value, is_adaptable


class LowRank(nn.Module):
    """A layer with its factors; its parameters are named as in checkpoints."""

    def __init__(self, layer: nn.Module, inputs: int, outputs: int, *, r: int, factor: float) -> None:
        super().__init__()
        self.base_layer, self._factor = layer, factor
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(r, outputs, bias=False)})

    @property
    def weight(self) -> Any:
        """The layer's own weight, whose dtype T5's feed-forward block asks for."""
        return self.base_layer.weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(..., inputs) -> (..., outputs)."""
        first: Any = self.lora_A["default"]
        second: Any = self.lora_B["default"]
        found: torch.Tensor = self.base_layer(states)
        return found + self._factor * second(first(states))


def add_low_rank(model: Any, section: AdapterSection, *, seed: int) -> None:
    """Freeze the model and give the layers of `adapter.target_modules` factors, with their initial values.

    all-linear: every linear layer except the output embedding. Raises UserError for a layer that is not linear, and
    where `peft` gives factors to parameters, as of fused experts.
    """
    if fused := sorted(as_peft_reads(section, model).target_parameters or ()):
        raise UserError(
            f"adapter.target_modules = {', '.join(section.target_modules)}: {', '.join(fused)} have factors, which are "
            "parameters of routers and fused experts; the oracle knows linear layers"
        )
    model.requires_grad_(False)
    head, factor = model.get_output_embeddings(), section.alpha / (section.r**0.5 if section.rslora else section.r)
    everything = section.target_modules == ("all-linear",)
    for name, layer in list(model.named_modules()):
        if everything and (layer is head or not isinstance(layer, nn.Linear | Conv1D) or not is_adaptable(layer)):
            continue
        if not everything and not any(f".{name}".endswith(f".{one}") for one in section.target_modules):
            continue
        if not isinstance(layer, nn.Linear | Conv1D):
            raise UserError(
                f"adapter.target_modules: {name} is a {type(layer).__name__}; the oracle knows linear layers"
            )
        inputs, outputs = layer.weight.shape[:: 1 if isinstance(layer, Conv1D) else -1]
        adapted = LowRank(layer, inputs, outputs, r=section.r, factor=factor)
        for key, parameter in adapted.named_parameters():
            value = initial_value(section, f"{name}.{key}", parameter.shape, seed=seed)
            if value is not None:
                parameter.data = value
        above, _, own = name.rpartition(".")
        setattr(model.get_submodule(above), own, adapted)
