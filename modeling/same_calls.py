"""Keeps all ranks calling the same modules in the same order, by which ZeRO pairs up their gradients.

DeepSpeed reduces the gradients of ZeRO-1 and 2 in buckets that each rank fills as its backward pass makes them: ranks
that call different modules of one size add up gradients of different parameters, without an error. At ZeRO-3 they
also gather different parameters, and one that no rank uses keeps the gradient of an earlier step.
"""

from types import MethodType
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from config.errors import UserError


def refuse_layerdrop(config: PretrainedConfig, *, stage: int, ranks: int) -> None:
    """Raises UserError for a model whose ranks would leave out layers, each its own, in training."""
    if stage < 3 and (stage == 0 or ranks == 1):
        return
    for key, value in config.to_dict().items():
        if key.endswith("layerdrop") and value:
            raise UserError(
                f"model.config.{key} = {value:g}: ranks would drop different layers, whose gradients ZeRO-{stage} "
                f"would confuse; set model.config.{key}=0.0"
            )


def call_every_expert(model: PreTrainedModel) -> None:
    """Let Switch Transformers, whose experts are modules, call also those that no token of this rank is sent to."""
    for module in model.modules():
        if type(module).__name__ == "SwitchTransformersExperts":
            module.forward = MethodType(_every_expert, module)


def _every_expert(
    experts: Any, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' loop over all experts. hidden_states: (tokens, width). selected_experts: (tokens, 1, experts), one
    where the expert is chosen. routing_weights: (tokens, 1)."""
    result = torch.zeros_like(hidden_states)
    for expert, chosen in zip(experts.values(), selected_experts.permute(2, 1, 0), strict=True):
        which, tokens = torch.where(chosen)
        made = expert(hidden_states[tokens]) * routing_weights[tokens, which, None]
        result.index_add_(0, tokens, made.to(result.dtype))
    return result
