"""The reference for half precision: the same model in plain torch and FP32, unpartitioned, without DeepSpeed.

It shares only the Hugging Face architecture and the loss with the engine: not the engine's accumulation, reduction,
scaling or optimizer. Each rank holds the whole model with its gradients, 8 bytes a parameter, and
the activations of a micro-batch (under the run's own activation checkpointing).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from config.resolved import Resolved
from data.loader import Batch
from modeling.activation_checkpointing import apply_activation_checkpointing
from modeling.adapter import add_adapter
from modeling.build import build_model
from modeling.linear_cross_entropy import label_loss_sum
from training.distributed import World


class Reference:
    """One FP32 copy of the model, whose weights are set to a run's masters."""

    def __init__(self, resolved: Resolved, shape: PretrainedConfig, world: World) -> None:
        section = resolved.config.model
        self.model: PreTrainedModel = build_model(
            section, shape, seed=resolved.config.run.seed, gather=lambda _: nullcontext(True)
        )
        if resolved.config.adapter.kind != "none":
            self.model = add_adapter(self.model, resolved.config.adapter, seed=resolved.config.run.seed)
        apply_activation_checkpointing(
            self.model,
            section.activation_checkpointing,
            reentrant=section.checkpointing_reentrant,
            every=section.checkpointing_every,
        )
        torch.nn.Module.to(self.model, world.device)
        self._world = world

    @torch.no_grad()
    def load(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Set the weights that are trained. masters: by the name in `named_parameters`, unpartitioned."""
        for name, master in masters.items():
            self.model.get_parameter(name).copy_(master)

    def loss_and_gradients(self, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
        """Mean loss over the global batch in nats, and its gradients by name, FP32. A collective."""
        device = self._world.device
        self.model.zero_grad()
        totals = torch.tensor([0.0, float(batch.label_tokens)], dtype=torch.float64, device=device)
        tokens = self._world.sum(totals.clone())[1].clamp_(min=1.0)
        for inputs, labels in batch.micro_batches(device):
            loss = label_loss_sum(self.model(**inputs, use_cache=False).logits, labels)
            (loss / tokens.to(loss.dtype)).backward()
            totals[0] += loss.detach().double()
        found = {}
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name] = self._world.sum(gradient.detach())
        return float(self._world.sum(totals)[0] / tokens), found


def clip_coefficient(norm: float, largest: float) -> float:
    """Factor on the gradient so that its norm is at most `largest`; 1 where `largest` is 0: no clipping."""
    return largest / (norm + 1e-6) if 0 < largest < norm else 1.0


def has_dropout(config: Any) -> bool:
    """Whether the architecture's config has a dropout probability above 0."""
    values: dict[str, Any] = config.to_dict()
    return any(
        ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float) and math.isfinite(value) and value > 0
        for key, value in values.items()
    )
