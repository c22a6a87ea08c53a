"""Defects that were thought of after the judge had been finished, and tried on it as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from data.batches import loader
from data.batches.loader import IGNORED_LABEL, Batch
from lab.detection.plants import gradients
from lab.detection.plants.elsewhere import DROPOUT
from lab.detection.plants.forward import change_with_residual, in_fp32, with_base
from lab.detection.plants.shared import on_batches, relabelled
from lab.detection.plants.site import (
    ATTENTION,
    BAD_RANK,
    EMBEDDING,
    HEAD,
    MLP,
    ROTARY,
    EnginePlant,
    around,
    around_engine,
    around_forward,
    change_gradients,
    forward_of,
    instead_of,
    on_bad_rank,
    on_engine,
    replace_attention,
)
from lab.detection.plants.state import after_load, at_load
from lab.detection.plants.updates import Rule, rule
from training import loss_scaler, parts
from training.engine import Engine
from training.engine.gradients import reduced_gradient
from training.engine.masters import local_masters
from training.engine.tensors import shard_of, whole_master

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
sdpa = functional.scaled_dot_product_attention

# ---- forward passes


def rotary_base_of_one_layer(engine: Engine, size: float) -> None:
    """The queries and keys of that layer are turned by other angles than the table's."""
    rotary: Any = engine.model.get_submodule(ROTARY)
    frequencies = with_base(rotary.inv_freq, 1 + size)

    def forward(right: Callable[..., Any], *args: Any, position_embeddings: Any, **options: Any) -> Any:
        cos, _ = position_embeddings
        angles = torch.arange(cos.shape[1])[:, None] * frequencies
        both = torch.cat((angles, angles), -1).expand(cos.shape)
        return right(*args, position_embeddings=(both.cos().to(cos.dtype), both.sin().to(cos.dtype)), **options)

    around_forward(engine, ATTENTION, forward)


def attention_of(attend: Attend) -> EnginePlant:
    """Decorator of the attention of one layer, as sdpa makes it but for its inputs and its mask: from queries, keys,
    values of every head in FP32, the mask (batch, heads, queries, keys) bool, and the size."""

    def plant(engine: Engine, size: float) -> None:
        def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
            shape = (*query.shape[:3], key.shape[2])
            seen = torch.ones(shape[-2:], dtype=torch.bool).tril() if mask is None else mask
            found = attend(*in_fp32(module, query, key, value), seen.expand(shape), size)
            return found.to(query.dtype).transpose(1, 2), None

        replace_attention(engine, [ATTENTION], attention)

    return plant


@attention_of
def one_head_sees_the_next_token(query: Any, key: Any, value: Any, mask: torch.Tensor, size: float) -> torch.Tensor:
    wrong = mask.clone()
    wrong[:, 1] |= mask[:, 1].roll(-1, -2)
    return sdpa(query, key, value, wrong)


@attention_of
def one_head_forgets_the_first_token(query: Any, key: Any, value: Any, mask: torch.Tensor, size: float) -> torch.Tensor:
    """All queries but the first one's."""
    wrong = mask.clone()
    wrong[:, 1, 1:, 0] = False
    return sdpa(query, key, value, wrong)


@attention_of
def scores_capped(query: Any, key: Any, value: Any, mask: torch.Tensor, size: float) -> torch.Tensor:
    """Softly, at `size`, far above any of them."""
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    capped = (size * (scores / size).tanh()).masked_fill(~mask, -torch.inf)
    found: torch.Tensor = capped.softmax(-1) @ value
    return found


@forward_of(f"{MLP}.act_fn")
def silu_is_gelu(module: Any, size: float, given: torch.Tensor) -> torch.Tensor:
    return functional.gelu(1.702 * given, approximate="tanh") / 1.702


scaled_residual = change_with_residual(
    lambda output, rest, size: (output.float() - size * rest.float()).to(output.dtype)
)
"""The second half of a block adds itself to its input times 1 - size."""


@forward_of(HEAD)
def head_deaf_to_gradients(module: Any, size: float, given: torch.Tensor) -> torch.Tensor:
    """One matrix is embedding and head, and only the embedding's gradient comes to it."""
    return functional.linear(given, module.weight.detach().to(given.dtype))


def dropout_not_scaled(engine: Engine, size: float) -> None:
    """Dropout does not divide the values that it keeps by their share."""
    module: Any = engine.model.get_submodule(DROPOUT)
    around(module, "forward", lambda right, given: right(given) * ((1 - module.p) if module.training else 1.0))


def other_dropout(engine: Engine, size: float) -> None:
    """A rate that is not the config's, in one place."""
    module: Any = engine.model.get_submodule(DROPOUT)
    module.p += size


def dropout_while_evaluated(engine: Engine, size: float) -> None:
    around(engine.deepspeed, "eval", lambda right: engine.deepspeed.train())


# ---- data and labels


@on_batches
def shifted_labels_of_some(batch: Batch) -> Batch:
    """Labels of one row in 16 are each the token after the next one."""
    rows, labels = batch.labels.shape[0] * batch.labels.shape[1], batch.labels.clone()
    first = batch.position * rows
    for row in range(rows):
        if (first + row) % 16 == 0:
            flat = labels.view(rows, -1)
            flat[row] = flat[row].roll(-1)
    return replace(batch, labels=labels)


@instead_of("split_for_rank", loader)
def repeated_row(right: Callable[..., Any], ids: Any, *, rank: int, **options: Any) -> Any:
    """The first row of one rank's is on the other rank, too, in place of its own."""
    mine, first = right(ids, rank=rank, **options), right(ids, rank=0, **options)
    if rank == BAD_RANK:
        mine = mine.copy()
        mine.flat[0] = first.flat[0]
    return mine


@on_batches
def last_label_lost(batch: Batch) -> Batch:
    """The last label of each row is lost, as if it had been cut one token too early."""
    labels = batch.labels.clone()
    labels[..., -1] = IGNORED_LABEL
    return relabelled(batch, labels)


@on_bad_rank
@on_batches
def counts_ignored_labels_on_one_rank(batch: Batch) -> Batch:
    """It divides by all positions, the others by those that have a label."""
    return replace(batch, label_tokens=batch.labels.numel())


# ---- gradients

dropped_last_micro_batch_on_one_rank = on_bad_rank(on_engine(gradients.dropped_last_micro_batch))


def embedding_left_out_of_the_norm(engine: Engine, size: float) -> None:
    """The norm that gradients are clipped by, and that is recorded, leaves out the embedding."""
    weight: Any = next(engine.model.get_submodule(EMBEDDING).parameters())

    def norm(right: Callable[[], torch.Tensor]) -> torch.Tensor:
        own, found = reduced_gradient(weight, engine.stage), right()
        if own is not None and bool(found.isfinite()):
            found.copy_((found.double().square() - own.double().square().sum()).clamp(min=0).sqrt())
        return found

    around(engine.gradients, "norm", norm)


def clipped_value_by_value(engine: Engine, size: float) -> None:
    """Gradients are clamped at `size` before anything else sees them."""
    change_gradients(engine, lambda gradient: gradient.clamp(-size * engine.loss_scale, size * engine.loss_scale))


# ---- updates


def swapped_betas_of_one_group(engine: Engine, size: float) -> None:
    """The group that does not decay has its betas exchanged."""
    optimizer: Any = engine.deepspeed.basic_optimizer
    for group in optimizer.param_groups:
        if not group["weight_decay"]:
            group["betas"] = group["betas"][::-1]


def doubled_decay_of_one_group(engine: Engine, size: float) -> None:
    optimizer: Any = engine.deepspeed.basic_optimizer
    for group in optimizer.param_groups:
        group["weight_decay"] *= 2


stale_momentum_on_one_rank = on_bad_rank(rule(lambda size: Rule(stale_first=True)))
"""The update goes by the first moment that was there before this gradient came to it."""


def last_value_not_updated(engine: Engine, size: float) -> None:
    """The last value of each rank's part stays, as by a loop that ends one value too early."""

    def apply(right: Callable[[], None]) -> None:
        held = [master.detach() for master in local_masters(engine.deepspeed.optimizer)]
        before = [master[-1:].clone() for master in held]
        right()
        for master, old in zip(held, before, strict=True):
            master[-1:] = old

    around(engine.gradients, "apply", apply)


@around_engine("step")
def truncated_copies(engine: Engine, size: float, right: Any, *args: Any, **options: Any) -> Any:
    """16-bit weights of one matrix are their masters cut off, not rounded."""
    update = right(*args, **options)
    with torch.no_grad():
        for parameter in engine.model.get_submodule(f"{MLP}.down_proj").parameters():
            _truncate(engine, parameter)
    return update


def _truncate(engine: Engine, parameter: Any) -> None:
    master = whole_master(engine, parameter)
    wide = master.to(parameter.dtype).float()
    beyond = wide.abs() > master.abs()
    bits = master.to(parameter.dtype).view(torch.int16)
    cut = torch.where(beyond, bits - 1, bits).view(parameter.dtype)  # one step toward zero
    if hasattr(parameter, "ds_tensor"):
        flat, size = cut.flatten(), parameter.ds_tensor.numel()
        own = flat[engine.world.rank * size : (engine.world.rank + 1) * size]
        parameter.ds_tensor.data.flatten()[: len(own)].copy_(own)
    else:
        parameter.data.copy_(cut)


# ---- loss scales


@instead_of("update_scale", loss_scaler.LossScaler)
def growth_counted_through_overflows(right: Callable[..., None], self: Any, overflow: bool) -> None:
    """An overflow does not begin the count of good steps anew."""
    key = "last_overflow_iteration"
    before = self.policy.state_dict()[key]
    right(self, overflow)
    if overflow:
        self.policy.load_state_dict({**self.policy.state_dict(), key: before})


# ---- resuming


count_ahead_at_load = at_load(lambda state, size: state["step"].add_(1))
moment_decayed_once_more_at_load = at_load(lambda state, size: state["exp_avg_sq"].mul_(size))


def exchanged_moments_at_load(engine: Engine, size: float) -> None:
    """Two matrices of one shape have each other's moments, in the parts that one rank has of both."""

    def change() -> None:
        both = [next(engine.model.get_submodule(f"{MLP}.{name}").parameters()) for name in ("gate_proj", "up_proj")]
        shards = [shard_of(engine, parameter) for parameter in both]
        held = [shard.tensors(engine)["exp_avg"] for shard in shards if shard is not None]
        if len(held) < 2:
            return
        first, second = held
        size = min(first.numel(), second.numel())
        kept = first.flatten()[:size].clone()
        first.flatten()[:size].copy_(second.flatten()[:size])
        second.flatten()[:size].copy_(kept)

    after_load(engine, change)


@instead_of("load_state_dict", parts.Parts)
def rate_one_step_back_after_a_resume(right: Callable[..., Any], self: Any, state: Any, **options: Any) -> Any:
    progress = right(self, state, **options)
    return replace(progress, applied=progress.applied - 1)
