"""Forward passes that compute something else, in one module of the run or in all of a kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from lab.detection.plants.site import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    LAYER,
    MLP,
    NORM,
    ROTARY,
    EnginePlant,
    forward_of,
    replace_attention,
    replace_forward,
)
from modeling.objectives.objective import Scored
from training.engine import Engine

Softmax = Callable[[torch.Tensor, float], torch.Tensor]
"""Probabilities from the scores and the size of the defect."""


def _right(scores: torch.Tensor, size: float) -> torch.Tensor:
    return scores.float().softmax(-1)


def _scaled(scores: torch.Tensor, size: float) -> torch.Tensor:
    return _right(scores, size) * (1 + size)


def _in_bf16(scores: torch.Tensor, size: float) -> torch.Tensor:
    narrow = scores.bfloat16()
    exponentials = (narrow - narrow.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def in_fp32(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, blocked: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of every head in FP32, so that gradients are rounded once, after the sum over groups.

    blocked: the queries that share a key follow each other.
    """

    def every(shared: torch.Tensor) -> torch.Tensor:
        wide, groups = shared.float(), module.num_key_value_groups
        return wide.repeat_interleave(groups, dim=1) if blocked else wide.repeat(1, groups, 1, 1)

    return query.float(), every(key), every(value)


def _attention(
    softmax: Softmax = _right,
    *,
    everywhere: bool = False,
    scaled_scores: bool = False,
    causal: bool = True,
    blocked: bool = True,
) -> EnginePlant:
    """Attention as plain products, in one layer or in all."""

    def plant(engine: Engine, size: float) -> None:
        def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
            dtype = query.dtype
            query, key, value = in_fp32(module, query, key, value, blocked=blocked)
            scores = query @ key.transpose(2, 3) * (scaling * (1 + size if scaled_scores else 1.0))
            if mask is not None:
                scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
            elif causal:
                later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(later, -torch.inf)
            return (softmax(scores, size).float() @ value).to(dtype).transpose(1, 2).contiguous(), None

        every = [name for name, _ in engine.model.named_modules() if name.endswith(".self_attn")]
        replace_attention(engine, every if everywhere else [ATTENTION], attention)

    return plant


scaled_attention = _attention(_scaled)
scaled_attentions = _attention(_scaled, everywhere=True)
scaled_scores = _attention(scaled_scores=True)
softmax_in_bf16 = _attention(_in_bf16)
softmaxes_in_bf16 = _attention(_in_bf16, everywhere=True)
lost_causal_mask = _attention(causal=False)
repeated_key_order = _attention(blocked=False)


def _norm(
    *, everywhere: bool = False, variance: torch.dtype = torch.float32, eps: float = 0.0, scale: float = 0.0
) -> EnginePlant:
    """One RMSNorm or all, written out. eps, scale: what is added to the variance's eps and to 1, in sizes."""

    def plant(engine: Engine, size: float) -> None:
        def forward(module: Any, given: torch.Tensor) -> torch.Tensor:
            wide = given.float()  # once, so that its gradient is rounded once
            mean = wide.to(variance).pow(2).mean(-1, keepdim=True).float()
            normed = wide * (mean + module.variance_epsilon + eps * size).rsqrt() * (1 + scale * size)
            return module.weight.to(given.dtype) * normed.to(given.dtype)

        norms = [name for name, module in engine.model.named_modules() if type(module).__name__.endswith("RMSNorm")]
        for name in norms if everywhere else [NORM]:
            replace_forward(engine, name, forward)

    return plant


variance_in_bf16 = _norm(variance=torch.bfloat16)
variances_in_bf16 = _norm(variance=torch.bfloat16, everywhere=True)
norm_eps = _norm(eps=1.0)
scaled_norm = _norm(scale=1.0)


def _scaled_linear(module: Any, size: float, given: torch.Tensor) -> torch.Tensor:
    wide = functional.linear(given.float(), module.weight.to(given.dtype).float())
    return (wide * (1 + size)).to(given.dtype)


scaled_linear = forward_of(f"{MLP}.up_proj")(_scaled_linear)
scaled_head = forward_of(HEAD)(_scaled_linear)


@forward_of(EMBEDDING)
def scaled_embedding(module: Any, size: float, ids: torch.Tensor) -> torch.Tensor:
    return (functional.embedding(ids, module.weight.float()) * (1 + size)).to(module.weight.dtype)


@forward_of(MLP)
def scaled_mlp(module: Any, size: float, given: torch.Tensor) -> torch.Tensor:
    gate, up = module.gate_proj(given), module.up_proj(given)
    return module.down_proj((module.act_fn(gate).float() * up.float() * (1 + size)).to(gate.dtype))


approximate_activation = forward_of(f"{MLP}.act_fn")(lambda module, size, given: functional.hardswish(given))
"""Hard swish, as a fast kernel might have it."""


def change_with_residual(change: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]) -> EnginePlant:
    """Change the output of a block, given the residual of its second half and the size, too."""

    def plant(engine: Engine, size: float) -> None:
        kept: list[torch.Tensor] = []
        norm, block = map(engine.model.get_submodule, (f"{LAYER}.post_attention_layernorm", LAYER))
        norm.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        block.register_forward_hook(lambda module, args, output: change(output, kept.pop(), size))

    return plant


dropped_residual = change_with_residual(lambda output, residual, size: output - residual)
"""Residual of the second half of a block, dropped."""


def frequencies_in_bf16(engine: Engine, size: float) -> None:
    module: Any = engine.model.get_submodule(ROTARY)
    module.inv_freq = module.inv_freq.bfloat16().float()


def rotary_base(engine: Engine, size: float) -> None:
    """The base of the frequencies times 1 + size."""
    module: Any = engine.model.get_submodule(ROTARY)
    module.inv_freq = with_base(module.inv_freq, 1 + size)


def with_base(frequencies: torch.Tensor, factor: float) -> torch.Tensor:
    """Rotary frequencies whose base is `factor` times as large."""
    pairs = len(frequencies)
    return frequencies * factor ** (-torch.arange(pairs, dtype=torch.float32) / pairs)


@forward_of(ROTARY)
def positions_in_bf16(module: Any, size: float, states: torch.Tensor, position_ids: torch.Tensor) -> Any:
    angles = position_ids[..., None].bfloat16() * module.inv_freq.bfloat16()
    both = torch.cat((angles, angles), -1)
    return both.cos().to(states.dtype), both.sin().to(states.dtype)


def stale_head(engine: Engine, size: float) -> None:
    """A head that should share the embedding's weights computes with those of the start."""
    embedding: Any = engine.model.get_submodule(EMBEDDING)
    kept: list[torch.Tensor] = []

    def keep(module: Any, args: Any) -> None:
        if not kept:
            kept.append(embedding.weight.detach().clone())

    embedding.register_forward_pre_hook(keep)
    replace_forward(engine, HEAD, lambda module, given: functional.linear(given, kept[0].to(given.dtype)))


def _scored_by(losses: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]) -> EnginePlant:
    """Decorator of the loss of each label, from logits, labels and the size."""

    def plant(engine: Engine, size: float) -> None:
        def score(forward: Any, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
            logits = forward(**inputs, use_cache=False).logits
            return Scored((losses(logits, labels, size) * (labels >= 0)).sum())

        engine.objective.score = score  # type: ignore[method-assign]

    return plant


@_scored_by
def loss_in_bf16(logits: torch.Tensor, labels: torch.Tensor, size: float) -> torch.Tensor:
    """The sum over the vocabulary, and what comes of it, in BF16."""
    narrow = logits.bfloat16()
    exponentials = (narrow - narrow.amax(-1, keepdim=True).detach()).exp().sum(-1).log()
    chosen = narrow.gather(-1, labels.clamp(min=0)[..., None])[..., 0] - narrow.amax(-1).detach()
    return (exponentials - chosen).float()


@_scored_by
def smoothed_labels(logits: torch.Tensor, labels: torch.Tensor, size: float) -> torch.Tensor:
    """Label smoothing that nobody asked for."""
    logs = logits.float().log_softmax(-1)
    chosen = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(1 - size) * chosen - size * logs.mean(-1)
