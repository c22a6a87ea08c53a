"""Defects that other trainers and kernels had, found in their issue threads, and tried on the judge as it was."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import deepspeed
import numpy as np
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from data.batches import loader
from data.batches.loader import IGNORED_LABEL, Batch
from data.corpora.sampler import permute
from lab.detection.plants.shared import on_batches, relabelled
from lab.detection.plants.site import (
    ATTENTION,
    EMBEDDING,
    LINEAR,
    ROTARY,
    Site,
    around,
    around_engine,
    before_steps,
    change_gradients,
    forward_of,
    instead_of,
    replace_attention,
)
from lab.detection.plants.state import after_load
from modeling.activation_checkpointing import blocks_of
from modeling.objectives.objective import Scored
from training import session
from training.engine import Engine
from training.engine.optimizers import muon

ADAPTED = "model.layers.1.self_attn.q_proj"
DROPOUT = "transformer.h.1.mlp.dropout"
END = 256
"""The token that ends a document, of the tokenizer of bytes."""

# ---- forward passes


def rotary_scaling_dropped(engine: Engine, size: float) -> None:
    """A load makes the frequencies anew without the config's scaling (unsloth 6907, NeMo Automodel 2825)."""
    module: Any = engine.model.get_submodule(ROTARY)
    pairs = len(module.inv_freq)
    module.inv_freq = 10000.0 ** (-torch.arange(pairs, dtype=torch.float32) / pairs)


def window_too_long(engine: Engine, size: float) -> None:
    """One token more than the window, in one layer (transformers 39408, vLLM 3385)."""
    module: Any = engine.model.get_submodule(ATTENTION)
    right: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(owner: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        places = torch.arange(key.shape[2])
        return right(owner, query, key, value, mask | (places[:, None] - places == module.sliding_window), **options)

    replace_attention(engine, [ATTENTION], attention)


@forward_of(ATTENTION)
def norm_after_rotation(
    module: Any, size: float, hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, **options: Any
) -> Any:
    """Queries and keys are turned first, and divided by their length then."""
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    query, key, value = (
        project(hidden_states).view(shape).transpose(1, 2) for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    query, key = module.q_norm(query), module.k_norm(key)
    attended, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, attention_mask, dropout=0.0, scaling=module.scaling
    )
    return module.o_proj(attended.reshape(*hidden_states.shape[:-1], -1)), None


exact_gelu = forward_of("transformer.h.1.mlp.act")(lambda module, size, given: functional.gelu(given))
"""A GELU takes the place of the one that is made of tanh."""


@forward_of("transformer.wpe")
def positions_count_on(module: Any, size: float, ids: torch.Tensor) -> torch.Tensor:
    """Documents are kept apart, but do not begin at position 0 (TransformerLens 1609, nnsight 673)."""
    return functional.embedding(torch.arange(ids.shape[-1]).expand(ids.shape), module.weight)


def final_cap_left_out(engine: Engine, size: float) -> None:
    """The loss is made of logits that were not capped, as a kernel of head and loss in one that knows of no cap."""
    cap: float = engine.model.config.final_logit_softcapping

    def score(forward: Any, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        logits = forward(**inputs, use_cache=False).logits.float()
        losses = functional.cross_entropy(
            (cap * (logits / cap).atanh()).flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        return Scored(losses)

    engine.objective.score = score  # type: ignore[method-assign]


def dropped_anew_in_recomputation(engine: Engine, size: float) -> None:
    """Recomputed blocks drop other values than they did (OLMo-core 828, guided-diffusion 167, pytorch 190758)."""
    for block in blocks_of(engine.model):
        block._gradient_checkpointing_func = partial(  # type: ignore[assignment]
            checkpoint, use_reentrant=False, preserve_rng_state=False
        )


def one_mask_for_all(engine: Engine, size: float) -> None:
    """One place drops the same values in every micro-batch, as a kernel whose seed never changes."""

    module: Any = engine.model.get_submodule(DROPOUT)

    def forward(right: Callable[..., torch.Tensor], given: torch.Tensor) -> torch.Tensor:
        used = right(given)  # other places draw what they would have drawn
        if not module.training:
            return used
        kept = torch.rand(given.shape, generator=torch.Generator().manual_seed(5)) >= module.p
        return given * kept / (1 - module.p)

    around(module, "forward", forward)


# ---- adapters and preferences


def adapter_by_the_root_of_its_rank(engine: Engine, size: float) -> None:
    """One layer's factor is alpha / sqrt(r), which nobody asked for (peft 3449 and 3473)."""
    layer: Any = engine.model.get_submodule(ADAPTED)
    layer.scaling = {name: factor * layer.r[name] ** 0.5 for name, factor in layer.scaling.items()}


@around_engine("step")
def base_merged_and_unmerged(engine: Engine, size: float, right: Any, *args: Any, **options: Any) -> Any:
    """After each step an adapter is added to its frozen layer and taken off again, in the layer's 16 bits."""
    layer: Any = engine.model.get_submodule(ADAPTED)
    update = right(*args, **options)
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(layer.parameters()), modifier_rank=0):
        base = layer.base_layer.weight
        delta = layer.lora_B.default.weight @ layer.lora_A.default.weight * layer.scaling["default"]
        delta = delta.to(base.dtype)
        base.add_(delta).sub_(delta)
    return update


def reference_trained_along(engine: Engine, size: float) -> None:
    """The reference of preferences is the model itself (TRL 6443)."""
    found: Any = engine.objective
    found._adapter_off = nullcontext


def other_constant(engine: Engine, size: float) -> None:
    """The task's loss has a constant that is larger by `size`: beta of preferences, or alpha of noise on embeddings."""
    found: Any = engine.objective
    if hasattr(found, "_section"):
        found._section = replace(found._section, beta=found._section.beta * (1 + size))
    else:
        found._noise._alpha *= 1 + size


# ---- data and labels


@on_batches
def end_of_answers_lost(batch: Batch) -> Batch:
    """The token that ends an answer has no label, so the model never learns to stop (verl 3562)."""
    labels = batch.labels.clone()
    following = functional.pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL)
    labels[following == IGNORED_LABEL] = IGNORED_LABEL  # the last label of each answer
    return relabelled(batch, labels)


@instead_of("sample_ids", loader)
def same_order_in_every_epoch(
    right: Callable[..., Any], position: int, *, samples: int, seed: int, global_size: int
) -> np.ndarray:
    """The sampler is not told of the epoch (DALLE-pytorch 230, KAIR 106)."""
    within = (position * global_size + np.arange(global_size, dtype=np.int64)) % samples
    return permute(within, samples=samples, seed=seed, epoch=np.zeros_like(within))


@instead_of("validation_batches", session)
def evaluated_on_rows_of_one_rank(right: Callable[..., Any], split: Any, **options: Any) -> Any:
    """Every rank evaluates the rows of the first one, and the others' are never seen."""
    return right(split, **{**options, "rank": 0})


# ---- gradients and updates


@forward_of(EMBEDDING)
def end_token_without_a_gradient(module: Any, size: float, ids: torch.Tensor) -> torch.Tensor:
    """The embedding takes the token that ends a document for padding."""
    return functional.embedding(ids, module.weight, padding_idx=END)


@around_engine("forward_backward")
def z_loss_summed_over_micro_batches(engine: Engine, size: float, right: Any, batch: Batch, **options: Any) -> Any:
    """The sum replaces the mean (Megatron-LM 1532)."""
    with patch.object(engine.router, "_z", engine.router._z * len(batch.input_ids)):  # type: ignore[union-attr]
        return right(batch, **options)


def gradient_of_the_step_before(engine: Engine, size: float) -> None:
    """One step uses one matrix's old gradient: a bucket that was reduced before it was filled (DeepSpeed 5545, 8061).

    size: [steps] the one in which it is.
    """
    now, calls = 0, 0
    kept: dict[int, torch.Tensor] = {}

    def count(step: int) -> None:
        nonlocal now, calls
        now, calls = step, 0

    def stale(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        before, kept[calls] = kept.get(calls, gradient), gradient.detach().clone()
        return before if now == int(size) else gradient

    before_steps(engine, count)
    change_gradients(engine, stale, where=LINEAR)


def four_iterations(site: Site) -> None:
    """Newton and Schulz's method stops one iteration early."""
    site.patch(muon, "ITERATIONS", muon.ITERATIONS - 1)


def other_decay_in_the_first_step_after_a_load(engine: Engine, size: float) -> None:
    """It is that of torch's default, until the schedule sets it again (Megatron-LM 7468, NeMo Automodel 3882)."""
    optimizer: Any = engine.deepspeed.basic_optimizer
    right_ones: list[float] = []

    def change() -> None:
        right_ones[:] = [group["weight_decay"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["weight_decay"] = min(group["weight_decay"], size)

    def step(right: Callable[..., Any], *args: Any, **options: Any) -> Any:
        update = right(*args, **options)
        for group, decay in zip(optimizer.param_groups, right_ones, strict=False):
            group["weight_decay"] = decay
        right_ones.clear()
        return update

    after_load(engine, change)
    around(engine, "step", step)
