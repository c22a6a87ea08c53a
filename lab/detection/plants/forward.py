"""Forward passes that compute something else, in one module of the run or in all of a kind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lab.detection.plants.site import ATTENTION, EMBEDDING, HEAD, LAYER, MLP, NORM, ROTARY, replace_forward
from modeling.objectives.objective import Scored
from training.engine import Engine

Softmax = Callable[[torch.Tensor], torch.Tensor]


def _right(scores: torch.Tensor) -> torch.Tensor:
    return scores.float().softmax(-1)


def _in_bf16(scores: torch.Tensor) -> torch.Tensor:
    narrow = scores.bfloat16()
    exponentials = (narrow - narrow.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def _write_out(
    engine: Engine,
    names: list[str],
    softmax: Softmax = _right,
    *,
    factor: float = 1.0,
    causal: bool = True,
    blocked: bool = True,
) -> None:
    """Attention as plain products. factor: of the scores. blocked: the queries that share a key follow each other."""

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        groups = module.num_key_value_groups
        if blocked:
            key, value = (item.repeat_interleave(groups, dim=1) for item in (key, value))
        else:
            key, value = (item.repeat(1, groups, 1, 1) for item in (key, value))
        scores = query @ key.transpose(2, 3) * (scaling * factor)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        elif causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return (softmax(scores).to(query.dtype) @ value).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS["planted"] = attention
    for name in names:
        module: Any = engine.model.get_submodule(name)
        module.config = copy.copy(module.config)
        module.config._attn_implementation = "planted"


def _attentions(engine: Engine) -> list[str]:
    return [name for name, _ in engine.model.named_modules() if name.endswith(".self_attn")]


def scaled_attention(engine: Engine, size: float) -> None:
    _write_out(engine, [ATTENTION], lambda scores: _right(scores) * (1 + size))


def scaled_attentions(engine: Engine, size: float) -> None:
    _write_out(engine, _attentions(engine), lambda scores: _right(scores) * (1 + size))


def scaled_scores(engine: Engine, size: float) -> None:
    _write_out(engine, [ATTENTION], factor=1 + size)


def softmax_in_bf16(engine: Engine, size: float) -> None:
    _write_out(engine, [ATTENTION], _in_bf16)


def softmaxes_in_bf16(engine: Engine, size: float) -> None:
    _write_out(engine, _attentions(engine), _in_bf16)


def lost_causal_mask(engine: Engine, size: float) -> None:
    _write_out(engine, [ATTENTION], causal=False)


def repeated_key_order(engine: Engine, size: float) -> None:
    _write_out(engine, [ATTENTION], blocked=False)


def _norm(
    engine: Engine, names: list[str], *, variance: torch.dtype = torch.float32, eps: float = 0.0, factor: float = 1.0
) -> None:
    def make(module: Any) -> Callable[..., Any]:
        def forward(given: torch.Tensor) -> torch.Tensor:
            wide = given.to(variance)
            mean = wide.pow(2).mean(-1, keepdim=True).float()
            normed = given.float() * (mean + module.variance_epsilon + eps).rsqrt() * factor
            return module.weight.to(given.dtype) * normed.to(given.dtype)

        return forward

    for name in names:
        replace_forward(engine, name, make)


def _norms(engine: Engine) -> list[str]:
    return [name for name, module in engine.model.named_modules() if type(module).__name__.endswith("RMSNorm")]


def variance_in_bf16(engine: Engine, size: float) -> None:
    _norm(engine, [NORM], variance=torch.bfloat16)


def variances_in_bf16(engine: Engine, size: float) -> None:
    _norm(engine, _norms(engine), variance=torch.bfloat16)


def norm_eps(engine: Engine, size: float) -> None:
    _norm(engine, [NORM], eps=size)


def scaled_norm(engine: Engine, size: float) -> None:
    _norm(engine, [NORM], factor=1 + size)


def scaled_linear(engine: Engine, size: float) -> None:
    _scale_linear(engine, f"{MLP}.up_proj", size)


def scaled_head(engine: Engine, size: float) -> None:
    _scale_linear(engine, HEAD, size)


def _scale_linear(engine: Engine, name: str, size: float) -> None:
    def make(module: Any) -> Callable[..., Any]:
        def forward(given: torch.Tensor) -> torch.Tensor:
            wide = functional.linear(given.float(), module.weight.to(given.dtype).float())
            return (wide * (1 + size)).to(given.dtype)

        return forward

    replace_forward(engine, name, make)


def scaled_embedding(engine: Engine, size: float) -> None:
    def make(module: Any) -> Callable[..., Any]:
        return lambda ids: (functional.embedding(ids, module.weight.float()) * (1 + size)).to(module.weight.dtype)

    replace_forward(engine, EMBEDDING, make)


def scaled_mlp(engine: Engine, size: float) -> None:
    def make(module: Any) -> Callable[..., Any]:
        def forward(given: torch.Tensor) -> torch.Tensor:
            gate, up = module.gate_proj(given), module.up_proj(given)
            return module.down_proj((module.act_fn(gate).float() * up.float() * (1 + size)).to(gate.dtype))

        return forward

    replace_forward(engine, MLP, make)


def approximate_activation(engine: Engine, size: float) -> None:
    """Hard swish, as a fast kernel might have it."""
    replace_forward(engine, f"{MLP}.act_fn", lambda module: functional.hardswish)


def dropped_residual(engine: Engine, size: float) -> None:
    """Drop the residual of the second half of a block."""
    kept: list[torch.Tensor] = []
    norm, block = engine.model.get_submodule(f"{LAYER}.post_attention_layernorm"), engine.model.get_submodule(LAYER)
    norm.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    block.register_forward_hook(lambda module, args, output: _less(output, kept.pop()))


def _less(output: Any, residual: torch.Tensor) -> Any:
    return output - residual if isinstance(output, torch.Tensor) else (output[0] - residual, *output[1:])


def frequencies_in_bf16(engine: Engine, size: float) -> None:
    module: Any = engine.model.get_submodule(ROTARY)
    module.inv_freq = module.inv_freq.bfloat16().float()


def rotary_base(engine: Engine, size: float) -> None:
    """The base of the frequencies times 1 + size."""
    module: Any = engine.model.get_submodule(ROTARY)
    pairs = len(module.inv_freq)
    module.inv_freq = module.inv_freq * (1 + size) ** (-torch.arange(pairs, dtype=torch.float32) / pairs)


def positions_in_bf16(engine: Engine, size: float) -> None:
    def make(module: Any) -> Callable[..., Any]:
        def forward(states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            angles = position_ids[..., None].bfloat16() * module.inv_freq.bfloat16()
            both = torch.cat((angles, angles), -1)
            return both.cos().to(states.dtype), both.sin().to(states.dtype)

        return forward

    replace_forward(engine, ROTARY, make)


def stale_head(engine: Engine, size: float) -> None:
    """A head that should share the embedding's weights computes with those of the start."""
    embedding: Any = engine.model.get_submodule(EMBEDDING)
    kept: list[torch.Tensor] = []

    def keep(module: Any, args: Any) -> None:
        if not kept:
            kept.append(embedding.weight.detach().clone())

    embedding.register_forward_pre_hook(keep)
    replace_forward(engine, HEAD, lambda module: lambda given: functional.linear(given, kept[0].to(given.dtype)))


def loss_in_bf16(engine: Engine, size: float) -> None:
    """The sum over the vocabulary, and what comes of it, in BF16."""

    def losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        narrow = logits.bfloat16()
        exponentials = (narrow - narrow.amax(-1, keepdim=True).detach()).exp().sum(-1).log()
        chosen = narrow.gather(-1, labels.clamp(min=0)[..., None])[..., 0] - narrow.amax(-1).detach()
        return (exponentials - chosen).float()

    _score(engine, losses)


def smoothed_labels(engine: Engine, size: float) -> None:
    """Label smoothing that nobody asked for."""

    def losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logs = logits.float().log_softmax(-1)
        chosen = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return -(1 - size) * chosen - size * logs.mean(-1)

    _score(engine, losses)


def _score(engine: Engine, losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    def score(forward: Any, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        logits = forward(**inputs, use_cache=False).logits
        return Scored((losses(logits, labels) * (labels >= 0)).sum())

    engine.objective.score = score  # type: ignore[method-assign]
