"""The reference for half precision: the same model in plain torch and FP32, unpartitioned, without DeepSpeed.

It shares only the Hugging Face architecture and the loss with the engine: not the engine's accumulation, reduction,
scaling or optimizer. A 4-bit or 8-bit base is dequantised to plain layers here. Each rank holds the whole model with
its gradients, 8 bytes per parameter, and the activations of a micro-batch (under the run's own activation
checkpointing).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from config.batch import WHOLE_POSITIONS
from config.resolved import Resolved
from config.task import model_class_of
from data.batches.loader import Batch
from modeling.activation_checkpointing import apply_activation_checkpointing
from modeling.adapter import add_adapter
from modeling.build import build_model, dropout_keys
from modeling.objectives.objective import Forward, Scored
from modeling.router_balance import RouterBalance, router_balance
from modeling.sequence_parallel import SequenceAttention
from tools.dequantise import dequantise
from tools.parity.plain import in_dtype
from tools.parity.recompute import products_in_fp32
from training.distributed import World
from training.engine.rng import generators, restore_generators
from training.tasks.task import objective_of


class Reference:
    """One FP32 copy of the model, whose weights are set to a run's masters."""

    def __init__(
        self, resolved: Resolved, shape: PretrainedConfig, world: World, teacher: Forward | None = None
    ) -> None:
        """teacher: the engine's, for a student. Leaves the random generators as they are: a run goes on with them."""
        before = generators(world.device)
        given, seed = resolved.config.model, resolved.config.run.seed
        section, shape = replace(given, attention=given.wide_attention), copy.deepcopy(shape)
        shape._attn_implementation = None  # the engine's model has put its own there
        model_class = model_class_of(resolved.config)
        self.model: PreTrainedModel = build_model(
            section, shape, seed=seed, model_class=model_class, adapter=resolved.config.adapter
        )
        dequantise(self.model)
        self.model = add_adapter(self.model, resolved.config.adapter, seed=seed, model_class=model_class)
        self._attention = None
        if world.sequence is not None:
            apart = resolved.config.keeps_documents_apart
            self._attention = SequenceAttention(self.model, world.sequence, apart=apart)
        self.objective = objective_of(resolved.config, self.model, teacher)
        apply_activation_checkpointing(
            self.model,
            section.activation_checkpointing,
            reentrant=section.checkpointing_reentrant,
            every=section.checkpointing_every,
        )
        torch.nn.Module.to(self.model, world.device)
        self._world = world
        self._router = router_balance(self.model, section)
        self._forward = self.model if self._router is None else self._router.watching(self.model)
        restore_generators(before, world.device)

    @torch.no_grad()
    def load(self, masters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Set the trained weights. masters: each with its name in `named_parameters`, unpartitioned."""
        for name, master in masters:
            self.weight(name).copy_(master)

    def weight(self, name: str) -> torch.Tensor:
        """The FP32 weight of that name."""
        return self.model.get_parameter(name).detach()

    def score(self, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        """Loss and sums of one micro-batch."""
        return self.objective.score(self._forward, inputs, labels)

    def loss_and_gradients(self, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
        """Mean loss over the global batch in nats, and its gradients by name, FP32. A collective."""
        loss = self._pass(batch)
        found = {}
        for name, parameter in self._trained():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name], parameter.grad = gradient.detach(), None  # the caller's alone, to free
        self._world.sum_all([*found.values()])
        return loss, found

    def gradients_in(
        self, dtype: str, batch: Batch, loss_scale: float, dice: torch.Generator | None = None
    ) -> dict[str, torch.Tensor]:
        """The gradients by name, FP32, with weights and activations in `dtype`, so that they show its rounding.

        Sums over micro-batches and ranks are in FP32. loss_scale: temporary factor on the loss. dice: rounds weights
        by chance (`by_chance`). Afterwards the weights are the FP32 ones again, bit for bit. A collective.
        """
        sums = {name: torch.zeros_like(parameter) for name, parameter in self._trained()}
        self.model.zero_grad()
        with in_dtype({self.model: dtype}, {}, dice=dice), products_in_fp32(), ExitStack() as stack:
            for name, parameter in self._trained():
                stack.enter_context(parameter.register_post_accumulate_grad_hook(partial(_move, sums[name])))
            self._pass(batch, loss_scale=loss_scale)
        self._world.sum_all([*sums.values()])
        return {name: gradient.div_(loss_scale) for name, gradient in sums.items()}

    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return (item for item in self.model.named_parameters() if item[1].requires_grad)

    def _pass(self, batch: Batch, *, loss_scale: float = 1.0) -> float:
        """Forward and backward of this rank's share of the global batch, whose mean loss in nats is returned."""
        device = self._world.device
        self.model.zero_grad()
        experts = None
        if self._router is not None:
            experts = tokens_by_expert(self._router, self.score, batch, self._world)
        totals = torch.tensor([0.0, float(batch.label_tokens)], dtype=torch.float64, device=device)
        tokens = self._world.sum(totals.clone())[1].clamp_(min=1.0)
        for inputs, labels in batch.micro_batches(device):
            loss = self.score(inputs, labels).loss
            mean = loss / tokens.to(loss.dtype)
            if self._router is not None and experts is not None:
                mean = mean + self._router.loss(experts)[0]
            (mean * loss_scale).backward()
            totals[0] += loss.detach().double()
        if self._attention is not None:  # modules called alone later get the first micro-batch's inputs
            self._attention.begin(batch.further[WHOLE_POSITIONS][0].to(device))
        return float(self._world.sum(totals)[0] / tokens)


@torch.no_grad()
def tokens_by_expert(
    router: RouterBalance, score: Callable[[Any, torch.Tensor], object], batch: Batch, world: World
) -> torch.Tensor:
    """(layers, experts) float64 token counts over the whole global batch. A collective. score: passes a micro-batch to
    the router's model, given its inputs and labels."""
    found: Any = 0
    for inputs, labels in batch.micro_batches(world.device):
        score(inputs, labels)
        found = found + router.counts()
    return world.sum(found)


def _move(into: torch.Tensor, parameter: torch.Tensor) -> None:
    """Add a parameter's gradient to an FP32 sum, and clear it."""
    assert parameter.grad is not None
    into += parameter.grad.float()
    parameter.grad = None


def dropouts(model: PreTrainedModel) -> list[str]:
    """Settings that make a model drop values in training: keys of its config, and an adapter's own, above 0."""
    layers = (module for name, module in model.named_modules() if ".lora_dropout." in name)
    adapted = any(getattr(layer, "p", 0.0) > 0 for layer in layers)
    return [*dropout_keys(model.config), *(["adapter.dropout"] if adapted else [])]
