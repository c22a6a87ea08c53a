"""Defects of data, gradients, evaluations and constants that no list had, tried on plain runs (docs/self-check.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from transformers.models.llama import modeling_llama

from data.batches import loader
from data.batches.loader import IGNORED_LABEL, Batch
from lab.detection.plants.later import attention_of, sdpa
from lab.detection.plants.permanent import stop_clipping
from lab.detection.plants.shared import on_batches, relabelled
from lab.detection.plants.site import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    LAYER,
    LINEAR,
    MLP,
    NORM,
    ROTARY,
    Counter,
    EnginePlant,
    Plant,
    Site,
    around,
    around_engine,
    around_forward,
    change_gradients,
    forward_of,
    instead_of,
    on_bad_rank,
    on_engine,
    replace_forward,
)
from lab.detection.plants.state import after_load, kept_weights, moments_lost_at_load
from training import loss_scaler, schedule, step
from training.engine import Engine
from training.engine import engine as engine_module


def _scaled_gradient(values: torch.Tensor, factor: float) -> torch.Tensor:
    """The same values, with a gradient times a factor."""
    if values.requires_grad:
        values = values.view_as(values)
        values.register_hook(lambda gradient: gradient * factor)
    return values


# ---- data


@on_batches
def labels_of_two_rows_exchanged(batch: Batch) -> Batch:
    labels = batch.labels.clone()
    labels[:, :2] = labels[:, :2].flip(1)
    return replace(batch, labels=labels)


@on_batches
def positions_from_one(batch: Batch) -> Batch:
    return replace(batch, position_ids=None if batch.position_ids is None else batch.position_ids + 1)


@on_batches
def glued_documents(batch: Batch) -> Batch:
    """Every second document of a row goes on with the positions of the one before."""
    assert batch.position_ids is not None
    positions = batch.position_ids.clone()
    for row in positions.view(-1, positions.shape[-1]):
        starts = [*(row == 0).nonzero().flatten().tolist(), len(row)]
        for first, end in zip(starts[1::2], starts[2::2], strict=False):
            row[first:end] += row[first - 1] + 1
    return replace(batch, position_ids=positions)


@on_batches
def labels_everywhere(batch: Batch) -> Batch:
    """Every token is predicted, ends of documents and prompts included."""
    following = functional.pad(batch.input_ids[..., 1:], (0, 1), value=IGNORED_LABEL)
    return relabelled(batch, torch.where(batch.labels == IGNORED_LABEL, following, batch.labels))


def _old_batches(is_old: Callable[[int], bool]) -> Plant:
    """Batches at some positions have the rows of the batch before."""

    def plant(site: Site) -> None:
        kept: list[Batch] = []

        @on_batches
        def changed(batch: Batch) -> Batch:
            kept[:] = [*kept[-1:], batch]
            old = is_old(batch.position)
            return replace(batch, input_ids=kept[0].input_ids, labels=kept[0].labels) if old else batch

        changed(site)

    return plant


every_fourth_batch_twice = _old_batches(lambda position: position % 4 == 3)
one_rank_a_batch_behind = on_bad_rank(_old_batches(lambda position: position > 1))


@on_batches
def first_token_lost(batch: Batch) -> Batch:
    return replace(batch, input_ids=functional.pad(batch.input_ids[..., 1:], (1, 0)))


@instead_of("sample_ids", loader)
def epoch_filled_up(right: Callable[..., Any], position: int, **options: int) -> Any:
    """The batch across the end of an epoch is filled up with that epoch's first samples."""
    size = options["global_size"]
    ids, over = right(position, **options).copy(), (position + 1) * size % options["samples"]
    if 0 < over < size:
        ids[-over:] = right(0, **options)[:over]
    return ids


# ---- loss and rate


def last_labels_lost(engine: Engine, size: float) -> None:
    """The last labels of a micro-batch are counted and have no loss, as in a last chunk that is cut off."""

    def score(right: Callable[..., Any], inputs: Any, labels: torch.Tensor, *args: Any, **options: Any) -> Any:
        labels = labels.clone()
        labels.view(-1)[-int(size) :] = IGNORED_LABEL
        return right(inputs, labels, *args, **options)

    around(engine.loss_path, "score", score)


def divided_by_old_labels(site: Site) -> None:
    """The loss is divided by the number of labels of the step before."""
    right, kept = engine_module.label_tokens_of_all, list[torch.Tensor]()

    def wrong(batch: Batch, world: Any) -> torch.Tensor:
        kept[:] = [*kept[-1:], right(batch, world)]
        return kept[0]

    site.patch(engine_module, "label_tokens_of_all", wrong)


def _schedule(*, ahead: int = 0, times: int = 1, **changed: Any) -> Plant:
    """Another schedule. changed: of its section."""

    @instead_of("learning_rate", schedule)
    def wrong(right: Callable[..., float], section: Any, *, peak: float, applied: int, total: int) -> float:
        return right(replace(section, **changed), peak=peak, applied=applied + ahead, total=total * times)

    return wrong


rate_a_step_early = _schedule(ahead=1)
rate_of_twice_the_steps = _schedule(times=2)
linear_for_cosine = _schedule(name="linear")


@on_bad_rank
@instead_of("scheduled_rate", step)
def rate_a_step_early_on_one_rank(right: Callable[..., float], config: Any, applied: int) -> float:
    return right(config, applied + 1)


# ---- updates


def _around_update(wrong: Callable[..., None]) -> EnginePlant:
    """A defect of torch's rule: `wrong` gets the right one, its optimizer, the masters and the defect's size."""

    def plant(engine: Engine, size: float) -> None:
        optimizer: Any = engine.deepspeed.basic_optimizer

        @torch.no_grad()
        def stepping(right: Callable[[], None], closure: Any = None) -> None:
            every = (master for group in optimizer.param_groups for master in group["params"])
            wrong(right, optimizer, [master for master in every if master.grad is not None], size)

        around(optimizer, "step", stepping)

    return plant


@on_bad_rank
@on_engine
@_around_update
def masters_stay_every_third_step(right: Callable[[], None], optimizer: Any, masters: Any, size: float) -> None:
    """One rank's."""
    before = [master.clone() for master in masters]
    right()
    for master, old in zip(masters, before, strict=True):
        if float(optimizer.state[master]["step"]) % 3 == 0:
            master.copy_(old)


@on_bad_rank
@on_engine
@_around_update
def second_moment_frozen(right: Callable[[], None], optimizer: Any, masters: Any, size: float) -> None:
    """One rank's, after its first update."""
    known = [optimizer.state[master] for master in masters if "exp_avg_sq" in optimizer.state.get(master, ())]
    before = [state["exp_avg_sq"].clone() for state in known]
    right()
    for state, old in zip(known, before, strict=True):
        state["exp_avg_sq"].copy_(old)


@_around_update
def borders_of_blocks_skipped(right: Callable[[], None], optimizer: Any, masters: Any, size: float) -> None:
    """One value in `size` is not updated."""
    before = [master.view(-1)[:: int(size)].clone() for master in masters]
    right()
    for master, old in zip(masters, before, strict=True):
        master.view(-1)[:: int(size)] = old


@_around_update
def decay_after_the_update(right: Callable[[], None], optimizer: Any, masters: Any, size: float) -> None:
    """It takes its share of the new master, not of the old one."""
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    right()
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay
        for master in group["params"]:
            master.mul_(1 - group["lr"] * decay)


@around_engine("step")
def rate_of_a_group_lost(engine: Engine, size: float, right: Callable[..., Any], *args: Any, **options: Any) -> Any:
    for group in engine.deepspeed.optimizer.param_groups:
        group["lr_factor"] = 1.0
    return right(*args, **options)


# ---- gradients


def norms_summed(engine: Engine, size: float) -> None:
    """Gradients of norms are summed over ranks, not averaged, as where they have a reduction of their own."""
    change_gradients(engine, lambda gradient: gradient * engine.world.world_size, where="norm")


def gradient_of(name: str) -> EnginePlant:
    """The gradient of one parameter is larger by `size`."""
    return lambda engine, size: change_gradients(engine, lambda gradient: gradient * (1 + size), where=name)


def tail_of_a_gradient_lost(engine: Engine, size: float) -> None:
    def change(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[-int(size) :] = 0
        return gradient

    change_gradients(engine, change, where=LINEAR)


def gradient_lost_every_16th_step(engine: Engine, size: float) -> None:
    now = Counter(engine)
    change_gradients(engine, lambda gradient: gradient * (now.step % 16 > 0), where=LINEAR)


@forward_of(EMBEDDING)
def last_token_wins(module: Any, size: float, ids: torch.Tensor) -> torch.Tensor:
    """A token that comes twice gives the embedding the gradient of its last place alone: written, not added."""
    flat, rows = ids.flatten(), functional.embedding(ids, module.weight)
    comes_again = (flat[:, None] == flat).triu(1).any(1).view(*ids.shape, 1)
    return torch.where(comes_again, rows.detach(), rows)


@forward_of(HEAD)
def half_of_the_head_gradient(module: Any, size: float, given: torch.Tensor) -> torch.Tensor:
    """One matrix is embedding and head, and half of the head's gradient comes to it."""
    return functional.linear(given, _scaled_gradient(module.weight, 0.5))


def gradient_through_an_mlp(engine: Engine, size: float) -> None:
    """The backward pass loses a tenth of what goes through one MLP."""

    around_forward(engine, MLP, lambda right, given: _scaled_gradient(right(given), 1 - size))


def keys_without_a_gradient(engine: Engine, size: float) -> None:
    module = engine.model.get_submodule(f"{ATTENTION}.k_proj")
    module.register_forward_hook(lambda module, args, output: output.detach())


# ---- loss scales


def _policy(change: Callable[[Any], None]) -> Plant:
    """Another policy of loss scales."""

    @instead_of("__init__", loss_scaler.LossScaler)
    def init(right: Callable[..., None], self: Any, section: Any) -> None:
        right(self, section)
        change(self.policy)

    return init


grows_a_step_early = _policy(lambda policy: setattr(policy, "_window", policy._window - 1))
backs_off_by_four = _policy(lambda policy: setattr(policy, "_FACTOR", 4.0))


# ---- copies


copies_every_fourth_step = kept_weights("", lambda step: step % 4 > 0)
frozen_embedding = kept_weights(EMBEDDING)


@on_bad_rank
@on_engine
def half_a_weight_stale(engine: Engine, size: float) -> None:
    """On one rank the second half of a weight is that of the step before, as after a gather that came too early."""
    now, kept = Counter(engine), dict[int, torch.Tensor]()

    def forward(module: Any, given: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        own = kept.setdefault(now.step, weight.detach().clone())
        half = len(own) // 2
        mixed = torch.cat([own[:half], kept.get(now.step - 1, own)[half:]])
        return functional.linear(given, weight + (mixed - own))

    replace_forward(engine, LINEAR, forward)


# ---- modules, their constants and what is between them


def constant(name: str, module: str, change: Callable[[Any], Any]) -> EnginePlant:
    """A number that a module holds."""

    def plant(engine: Engine, size: float) -> None:
        owner = engine.model.get_submodule(module)
        setattr(owner, name, change(getattr(owner, name)))

    return plant


def scale_of_the_embedding(engine: Engine, size: float) -> None:
    scale: Any = engine.model.get_submodule(EMBEDDING).embed_scale
    scale.mul_(1 + size)


def window_of_the_config(engine: Engine, size: float) -> None:
    engine.model.config.get_text_config().sliding_window += 1


@instead_of("create_causal_mask", modeling_llama)
def mask_leaks(right: Any, config: Any, inputs_embeds: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """All layers see the next token."""
    rows, length = inputs_embeds.shape[:2]
    return torch.ones(length, length, dtype=torch.bool).tril(1).expand(rows, 1, length, length)


@instead_of("create_causal_mask", modeling_llama)
def documents_see_each_other(right: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Positions begin anew in each document, and the mask does not."""
    return right(*args, **{**options, "position_ids": None})


def positions_off_in_the_decoder(engine: Engine, size: float) -> None:
    """The decoder hands other positions to its rotary table, from the 16th token on one more."""

    def shift(module: Any, args: Any, options: Any) -> Any:
        positions = options["position_ids"]
        return args, {**options, "position_ids": positions + (positions >= 16)}

    engine.model.get_submodule(ROTARY).register_forward_pre_hook(shift, with_kwargs=True)


def positions_off_in_the_table(engine: Engine, size: float) -> None:
    """The same inside the table, from the 32nd token on."""

    def forward(right: Callable[..., Any], x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return right(x, position_ids + (position_ids >= 32))

    around_forward(engine, ROTARY, forward)


def lost_between_blocks(engine: Engine, size: float) -> None:
    block = engine.model.get_submodule(LAYER)
    block.register_forward_pre_hook(lambda module, args: (args[0] * (1 - size), *args[1:]))


def larger_before_the_head(engine: Engine, size: float) -> None:
    engine.model.get_submodule(HEAD).register_forward_pre_hook(lambda module, args: (args[0] * (1 + size),))


@attention_of
def zero_head(query: Any, key: Any, value: Any, mask: torch.Tensor, size: float) -> torch.Tensor:
    """One head of an attention gives nothing."""
    output = sdpa(query, key, value, mask).clone()
    output[:, 1] = 0
    return output


def centred_norm(engine: Engine, size: float) -> None:
    """An RMSNorm subtracts the mean, as a LayerNorm does."""

    around_forward(engine, NORM, lambda right, given: right(given - given.mean(-1, keepdim=True)))


def norm_off_later(engine: Engine, size: float) -> None:
    """After the twelfth step."""
    now = Counter(engine)
    around_forward(engine, NORM, lambda right, given: right(given) * (1 + size if now.step > 12 else 1.0))


def norm_off_in_evaluations(engine: Engine, size: float) -> None:
    norm = engine.model.get_submodule(NORM)
    around(norm, "forward", lambda right, given: right(given) * (1.0 if norm.training else 1 + size))


def balance_lost(engine: Engine, size: float) -> None:
    """Routers are trained without the balancing loss."""
    router: Any = engine.router
    router._balance = 0.0


# ---- evaluations


@around_engine("evaluate")
def mean_of_batches(engine: Engine, size: float, right: Callable[..., Any], batches: Any) -> Any:
    found = [right([batch]) for batch in batches]
    return found[0]._replace(loss=sum(each.loss for each in found) / len(found))


@around_engine("evaluate")
def last_batch_dropped(engine: Engine, size: float, right: Callable[..., Any], batches: Any) -> Any:
    return right([*batches][:-1])


@around_engine("evaluate")
def last_batch_twice(engine: Engine, size: float, right: Callable[..., Any], batches: Any) -> Any:
    every = [*batches]
    return right([*every, every[-1]])


# ---- resuming

moments_of_one_rank_lost = on_bad_rank(on_engine(moments_lost_at_load))


def clipping_lost_at_load(engine: Engine, size: float) -> None:
    after_load(engine, partial(stop_clipping, engine))
