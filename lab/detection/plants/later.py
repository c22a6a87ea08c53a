"""Defects that were thought of after the judge had been finished, and tried on it as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from data.batches import loader
from data.batches.loader import IGNORED_LABEL, Batch
from lab.detection.plants.shared import change_batches
from lab.detection.plants.site import ATTENTION, BAD_RANK, EMBEDDING, HEAD, LAYER, MLP, Site, around, replace_forward
from lab.detection.plants.state import after_load, each_state
from lab.detection.plants.updates import Rule, rule
from training import loss_scaler, parts
from training.engine import Engine
from training.engine.gradients import reduced_gradient
from training.engine.masters import local_masters
from training.engine.tensors import shard_of, whole_master

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# ---- forward passes


def rotary_base_of_one_layer(engine: Engine, size: float) -> None:
    """The queries and keys of that layer are turned by other angles than the table's."""
    rotary: Any = engine.model.get_submodule("model.rotary_emb")
    pairs = rotary.inv_freq

    def make(module: Any) -> Callable[..., Any]:
        right, exponents = module.forward, torch.arange(len(pairs), dtype=torch.float32) / len(pairs)

        def forward(*args: Any, position_embeddings: Any, **options: Any) -> Any:
            cos, _ = position_embeddings
            angles = torch.arange(cos.shape[1])[:, None] * (pairs * (1 + size) ** -exponents)
            both = torch.cat((angles, angles), -1).expand(cos.shape)
            return right(*args, position_embeddings=(both.cos().to(cos.dtype), both.sin().to(cos.dtype)), **options)

        return forward

    replace_forward(engine, ATTENTION, make)


def attention_of(engine: Engine, attend: Attend) -> None:
    """Attention of one layer, as sdpa makes it but for its inputs and its mask: (batch, heads, queries, keys) bool."""

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        key, value = (item.repeat_interleave(module.num_key_value_groups, dim=1) for item in (key, value))
        shape = (*query.shape[:3], key.shape[2])
        causal = torch.ones(shape[-2:], dtype=torch.bool).tril().expand(shape)
        return attend(query, key, value, causal if mask is None else mask.expand(shape)).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS["planted"] = attention
    module: Any = engine.model.get_submodule(ATTENTION)
    module.config = copy.copy(module.config)
    module.config._attn_implementation = "planted"


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, key, value, mask)


def one_head_sees_the_next_token(engine: Engine, size: float) -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        wrong = mask.clone()
        wrong[:, 1] |= mask[:, 1].roll(-1, -2)
        return sdpa(query, key, value, wrong)

    attention_of(engine, attend)


def one_head_forgets_the_first_token(engine: Engine, size: float) -> None:
    """All queries but the first one's."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        wrong = mask.clone()
        wrong[:, 1, 1:, 0] = False
        return sdpa(query, key, value, wrong)

    attention_of(engine, attend)


def scores_capped(engine: Engine, size: float) -> None:
    """Softly, at `size`, far above any of them."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = query.float() @ key.float().transpose(2, 3) * query.shape[-1] ** -0.5
        capped = (size * (scores / size).tanh()).masked_fill(~mask, -torch.inf)
        return capped.softmax(-1).to(value.dtype) @ value

    attention_of(engine, attend)


def silu_is_gelu(engine: Engine, size: float) -> None:
    replace_forward(
        engine, f"{MLP}.act_fn", lambda module: lambda given: functional.gelu(1.702 * given, approximate="tanh") / 1.702
    )


def scaled_residual(engine: Engine, size: float) -> None:
    """The second half of a block adds itself to its input times 1 - size."""
    kept: list[torch.Tensor] = []
    norm, block = engine.model.get_submodule(f"{LAYER}.post_attention_layernorm"), engine.model.get_submodule(LAYER)
    norm.register_forward_pre_hook(lambda module, args: kept.append(args[0]))

    def less(module: Any, args: Any, output: Any) -> Any:
        return (output.float() - size * kept.pop().float()).to(output.dtype)

    block.register_forward_hook(less)


def head_deaf_to_gradients(engine: Engine, size: float) -> None:
    """One matrix is embedding and head, and only the embedding's gradient comes to it."""
    replace_forward(
        engine, HEAD, lambda module: lambda given: functional.linear(given, module.weight.detach().to(given.dtype))
    )


def dropout_not_scaled(engine: Engine, size: float) -> None:
    """Dropout does not divide the values that it keeps by their share."""
    module: Any = engine.model.get_submodule("transformer.h.1.mlp.dropout")
    right = module.forward
    module.forward = lambda given: right(given) * ((1 - module.p) if module.training else 1.0)


def other_dropout(engine: Engine, size: float) -> None:
    """A rate that is not the config's, in one place."""
    module: Any = engine.model.get_submodule("transformer.h.1.mlp.dropout")
    module.p += size


def dropout_while_evaluated(site: Site) -> None:
    def plant(engine: Engine) -> None:
        around(engine.deepspeed, "eval", lambda right: lambda: engine.deepspeed.train())

    site.when_built(plant)


# ---- data and labels


def shifted_labels_of_some(site: Site) -> None:
    """Labels of one row of `size` are each the token after the next one."""

    def change(batch: Batch) -> Batch:
        rows, labels = batch.labels.shape[0] * batch.labels.shape[1], batch.labels.clone()
        first = batch.position * rows
        for row in range(rows):
            if (first + row) % int(site.size) == 0:
                flat = labels.view(rows, -1)
                flat[row] = flat[row].roll(-1)
        return replace(batch, labels=labels)

    change_batches(site, change)


def repeated_row(site: Site) -> None:
    """The first row of one rank's is on the other rank, too, in place of its own."""
    right = loader.split_for_rank

    def wrong(ids: Any, *, rank: int, **options: Any) -> Any:
        mine, first = right(ids, rank=rank, **options), right(ids, rank=0, **options)
        if rank == BAD_RANK:
            mine = mine.copy()
            mine.flat[0] = first.flat[0]
        return mine

    site.patch(loader, "split_for_rank", wrong)


def last_label_lost(site: Site) -> None:
    """The last label of each row is lost, as if it had been cut one token too early."""

    def change(batch: Batch) -> Batch:
        labels = batch.labels.clone()
        labels[..., -1] = IGNORED_LABEL
        counted = int((labels != IGNORED_LABEL).sum())
        known = None if batch.label_tokens_of_all is None else counted * site.ranks
        return replace(batch, labels=labels, label_tokens=counted, label_tokens_of_all=known)

    change_batches(site, change)


def counts_ignored_labels_on_one_rank(site: Site) -> None:
    """It divides by all positions, the others by those that have a label."""
    if site.is_bad_rank:
        change_batches(site, lambda batch: replace(batch, label_tokens=batch.labels.numel()))


# ---- gradients


def dropped_last_micro_batch_on_one_rank(site: Site) -> None:
    def plant(engine: Engine) -> None:
        around(engine, "backward", lambda right: lambda loss, *, last: right(loss * (0.0 if last else 1.0), last=last))

    if site.is_bad_rank:
        site.when_built(plant)


def embedding_left_out_of_the_norm(engine: Engine, size: float) -> None:
    """The norm that gradients are clipped by, and that is recorded, leaves out the embedding."""
    weight: Any = next(engine.model.get_submodule(EMBEDDING).parameters())

    def less(right: Callable[..., Any]) -> Callable[..., Any]:
        def norm() -> torch.Tensor:
            own, found = reduced_gradient(weight, engine.stage), right()
            if own is not None and bool(found.isfinite()):
                found.copy_((found.double().square() - own.double().square().sum()).clamp(min=0).sqrt())
            return found

        return norm

    around(engine.gradients, "norm", less)


def clipped_value_by_value(engine: Engine, size: float) -> None:
    """Gradients are clamped at `size` before anything else sees them."""
    for parameter in engine.model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-size * engine.loss_scale, size * engine.loss_scale))


# ---- updates


def swapped_betas_of_one_group(site: Site) -> None:
    """The group that does not decay has its betas exchanged."""

    def change(optimizer: Any, engine: Engine) -> None:
        for group in optimizer.param_groups:
            if not group["weight_decay"]:
                group["betas"] = group["betas"][::-1]

    _on_optimizer(site, change)


def doubled_decay_of_one_group(site: Site) -> None:
    def change(optimizer: Any, engine: Engine) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] *= 2

    _on_optimizer(site, change)


def _on_optimizer(site: Site, change: Callable[[Any, Engine], None]) -> None:
    site.when_built(lambda engine: change(engine.deepspeed.basic_optimizer, engine))


def stale_momentum_on_one_rank(site: Site) -> None:
    """The update goes by the first moment that was there before this gradient came to it."""
    if site.is_bad_rank:
        rule(lambda size: Rule(stale_first=True))(site)


def last_value_not_updated(engine: Engine, size: float) -> None:
    """The last value of each rank's part stays, as by a loop that ends one value too early."""

    def stepping(right: Callable[..., Any]) -> Callable[..., Any]:
        def apply() -> None:
            held = [master.detach() for master in local_masters(engine.deepspeed.optimizer)]
            before = [master[-1:].clone() for master in held]
            right()
            for master, old in zip(held, before, strict=True):
                master[-1:] = old

        return apply

    around(engine.gradients, "apply", stepping)


def truncated_copies(engine: Engine, size: float) -> None:
    """16-bit weights of one matrix are their masters cut off, not rounded."""
    parameters = list(engine.model.get_submodule(f"{MLP}.down_proj").parameters())

    def stepping(right: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            update = right(*args, **options)
            with torch.no_grad():
                for parameter in parameters:
                    _truncate(engine, parameter)
            return update

        return step

    around(engine, "step", stepping)


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


def growth_counted_through_overflows(site: Site) -> None:
    """An overflow does not begin the count of good steps anew."""
    right = loss_scaler.LossScaler.update_scale

    def update_scale(self: Any, overflow: bool) -> None:
        before = self.policy.state_dict()
        right(self, overflow)
        if overflow:
            after = self.policy.state_dict()
            key = "last_overflow_iteration"
            self.policy.load_state_dict({**after, key: before[key]})

    site.patch(loss_scaler.LossScaler, "update_scale", update_scale)


# ---- resuming


def count_ahead_at_load(engine: Engine, size: float) -> None:
    after_load(engine, lambda: each_state(engine, lambda state: state["step"].add_(1)))


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


def moment_decayed_once_more_at_load(engine: Engine, size: float) -> None:
    after_load(engine, lambda: each_state(engine, lambda state: state["exp_avg_sq"].mul_(size)))


def rate_one_step_back_after_a_resume(site: Site) -> None:
    right = parts.Parts.load_state_dict

    def load(self: Any, state: Any, **options: Any) -> Any:
        progress = right(self, state, **options)
        return replace(progress, applied=progress.applied - 1)

    site.patch(parts.Parts, "load_state_dict", load)
