"""Defects of data, gradients, evaluations and constants that no list had, tried on plain runs (docs/self-check.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from transformers.models.llama import modeling_llama

from data.batches import loader
from data.batches.loader import IGNORED_LABEL, Batch
from lab.detection.plants.later import attention_of, sdpa
from lab.detection.plants.permanent import Change
from lab.detection.plants.shared import change_batches
from lab.detection.plants.site import (
    ATTENTION,
    BAD_RANK,
    EMBEDDING,
    HEAD,
    LAYER,
    LINEAR,
    MLP,
    NORM,
    ROTARY,
    Site,
    around,
    replace_forward,
)
from lab.detection.plants.state import after_load, each_state, held
from training import loss_scaler, schedule, step
from training.engine import Engine
from training.engine import engine as engine_module


def in_step(engine: Engine, change: Callable[[int], None]) -> None:
    """Call it with the number of each step before its passes."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def forward_backward(batch: Batch, *, step: int, **options: Any) -> Any:
            change(step)
            return right(batch, step=step, **options)

        return forward_backward

    around(engine, "forward_backward", make)


class Counter:
    """The step that an engine is in."""

    def __init__(self, engine: Engine) -> None:
        self.step = 0
        in_step(engine, lambda step: setattr(self, "step", step))


class Scaled(torch.autograd.Function):
    """The identity, with a gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *came: torch.Tensor) -> Any:
        return came[0] * ctx.factor, None


# ---- data


def labels_of_two_rows_exchanged(site: Site) -> None:
    def change(batch: Batch) -> Batch:
        labels = batch.labels.clone()
        labels[:, :2] = labels[:, :2].flip(1)
        return replace(batch, labels=labels)

    change_batches(site, change)


def positions_from_one(site: Site) -> None:
    def change(batch: Batch) -> Batch:
        return replace(batch, position_ids=None if batch.position_ids is None else batch.position_ids + 1)

    change_batches(site, change)


def glued_documents(site: Site) -> None:
    """Every second document of a row goes on with the positions of the one before."""

    def change(batch: Batch) -> Batch:
        assert batch.position_ids is not None
        positions = batch.position_ids.clone()
        for row in positions.view(-1, positions.shape[-1]):
            starts = [*(row == 0).nonzero().flatten().tolist(), len(row)]
            for first, end in zip(starts[1::2], starts[2::2], strict=False):
                row[first:end] += row[first - 1] + 1
        return replace(batch, position_ids=positions)

    change_batches(site, change)


def labels_everywhere(site: Site) -> None:
    """Every token is predicted, ends of documents and prompts included."""

    def change(batch: Batch) -> Batch:
        following = functional.pad(batch.input_ids[..., 1:], (0, 1), value=IGNORED_LABEL)
        labels = torch.where(batch.labels == IGNORED_LABEL, following, batch.labels)
        return replace(
            batch, labels=labels, label_tokens=int((labels != IGNORED_LABEL).sum()), label_tokens_of_all=None
        )

    change_batches(site, change)


def every_fourth_batch_twice(site: Site) -> None:
    _old_batches(site, lambda position: position % 4 == 3)


def one_rank_a_batch_behind(site: Site) -> None:
    if site.is_bad_rank:
        _old_batches(site, lambda position: position > 1)


def _old_batches(site: Site, is_old: Callable[[int], bool]) -> None:
    right, kept = loader.Batches.next_step, list[Batch]()

    def next_step(self: Any) -> Batch:
        batch = right(self)
        kept[:] = [*kept[-1:], batch]
        return replace(batch, input_ids=kept[0].input_ids, labels=kept[0].labels) if is_old(batch.position) else batch

    site.patch(loader.Batches, "next_step", next_step)


def first_token_lost(site: Site) -> None:
    def change(batch: Batch) -> Batch:
        return replace(batch, input_ids=functional.pad(batch.input_ids[..., 1:], (1, 0)))

    change_batches(site, change)


def epoch_filled_up(site: Site) -> None:
    """The batch across the end of an epoch is filled up with that epoch's first samples."""
    right = loader.sample_ids

    def wrong(position: int, *, samples: int, seed: int, global_size: int) -> Any:
        given: dict[str, int] = {"samples": samples, "seed": seed, "global_size": global_size}
        ids, over = right(position, **given).copy(), (position + 1) * global_size % samples
        if 0 < over < global_size:
            ids[-over:] = right(0, **given)[:over]
        return ids

    site.patch(loader, "sample_ids", wrong)


# ---- loss and rate


def last_labels_lost(engine: Engine, size: float) -> None:
    """The last labels of a micro-batch are counted and have no loss, as in a last chunk that is cut off."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def score(inputs: Any, labels: torch.Tensor, *args: Any, **options: Any) -> Any:
            labels = labels.clone()
            labels.view(-1)[-int(size) :] = IGNORED_LABEL
            return right(inputs, labels, *args, **options)

        return score

    around(engine.loss_path, "score", make)


def divided_by_old_labels(site: Site) -> None:
    """The loss is divided by the number of labels of the step before."""
    right, kept = engine_module.label_tokens_of_all, list[torch.Tensor]()

    def wrong(batch: Batch, world: Any) -> torch.Tensor:
        kept[:] = [*kept[-1:], right(batch, world)]
        return kept[0]

    site.patch(engine_module, "label_tokens_of_all", wrong)


def _schedule(site: Site, **changed: Any) -> None:
    right = schedule.learning_rate

    def wrong(section: Any, *, peak: float, applied: int, total: int) -> float:
        given = replace(section, name=changed.get("name", section.name))
        ahead, times = changed.get("ahead", 0), changed.get("times", 1)
        return right(given, peak=peak, applied=applied + ahead, total=total * times)

    site.patch(schedule, "learning_rate", wrong)


def rate_a_step_early(site: Site) -> None:
    _schedule(site, ahead=1)


def rate_of_twice_the_steps(site: Site) -> None:
    _schedule(site, times=2)


def linear_for_cosine(site: Site) -> None:
    _schedule(site, name="linear")


def rate_a_step_early_on_one_rank(site: Site) -> None:
    if site.is_bad_rank:
        right = step.scheduled_rate
        site.patch(step, "scheduled_rate", lambda config, applied: right(config, applied + 1))


# ---- updates


def _update(engine: Engine, change: Callable[..., None]) -> None:
    """Let `change` act around torch's rule: given a master, its state, and the rule for it alone."""
    optimizer: Any = engine.deepspeed.basic_optimizer
    right = optimizer.step

    def stepping(closure: Any = None) -> None:
        every = [master for group in optimizer.param_groups for master in group["params"] if master.grad is not None]
        with torch.no_grad():
            change(every, lambda master: optimizer.state.get(master, {}), right)

    optimizer.step = stepping


def masters_stay_every_third_step(site: Site) -> None:
    """One rank's."""

    def change(masters: Any, state: Any, right: Any) -> None:
        before = [master.clone() for master in masters]
        right()
        for master, old in zip(masters, before, strict=True):
            if float(state(master)["step"]) % 3 == 0:
                master.copy_(old)

    if site.is_bad_rank:
        site.when_built(lambda engine: _update(engine, change))


def second_moment_frozen(site: Site) -> None:
    """One rank's, after its first update."""

    def change(masters: Any, state: Any, right: Any) -> None:
        before = [state(master)["exp_avg_sq"].clone() if "exp_avg_sq" in state(master) else None for master in masters]
        right()
        for master, old in zip(masters, before, strict=True):
            if old is not None:
                state(master)["exp_avg_sq"].copy_(old)

    if site.is_bad_rank:
        site.when_built(lambda engine: _update(engine, change))


def borders_of_blocks_skipped(engine: Engine, size: float) -> None:
    """One value in `size` is not updated."""

    def change(masters: Any, state: Any, right: Any) -> None:
        before = [master.view(-1)[:: int(size)].clone() for master in masters]
        right()
        for master, old in zip(masters, before, strict=True):
            master.view(-1)[:: int(size)] = old

    _update(engine, change)


def decay_after_the_update(engine: Engine, size: float) -> None:
    """It takes its share of the new master, not of the old one."""
    optimizer: Any = engine.deepspeed.basic_optimizer

    def change(masters: Any, state: Any, right: Any) -> None:
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        right()
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
            for master in group["params"]:
                master.mul_(1 - group["lr"] * decay)

    _update(engine, change)


def rate_of_a_group_lost(engine: Engine, size: float) -> None:
    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def stepping(*args: Any, **options: Any) -> Any:
            for group in engine.deepspeed.optimizer.param_groups:
                group["lr_factor"] = 1.0
            return right(*args, **options)

        return stepping

    around(engine, "step", make)


# ---- gradients


def _of(engine: Engine, text: str, change: Change) -> None:
    for name, parameter in engine.model.named_parameters():
        if text in name:
            parameter.register_hook(change)


def norms_summed(engine: Engine, size: float) -> None:
    """Gradients of norms are summed over ranks, not averaged, as where they have a reduction of their own."""
    _of(engine, "norm", lambda gradient: gradient * engine.world.world_size)


def gradient_of_one_norm(engine: Engine, size: float) -> None:
    _of(engine, NORM, lambda gradient: gradient * (1 + size))


def half_of_a_bias_gradient(engine: Engine, size: float) -> None:
    _of(engine, "h.1.mlp.c_fc.bias", lambda gradient: gradient * 0.5)


def gradient_of_a_convolution(engine: Engine, size: float) -> None:
    """Scale the gradient of one of GPT-2's layers, which are convolutions of width 1."""
    _of(engine, "h.1.mlp.c_fc.weight", lambda gradient: gradient * (1 + size))


def tail_of_a_gradient_lost(engine: Engine, size: float) -> None:
    def change(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[-int(size) :] = 0
        return gradient

    _of(engine, LINEAR, change)


def gradient_lost_every_16th_step(engine: Engine, size: float) -> None:
    now = Counter(engine)
    _of(engine, LINEAR, lambda gradient: gradient * (now.step % 16 > 0))


class _LastRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, *came: torch.Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        found = came[0].new_zeros(ctx.shape)
        found[ids.flatten()] = came[0].reshape(-1, came[0].shape[-1])
        return None, found


def last_token_wins(engine: Engine, size: float) -> None:
    """A token that comes twice gives the embedding the gradient of its last place alone: written, not added."""
    replace_forward(engine, EMBEDDING, lambda module: lambda ids: _LastRow.apply(ids, module.weight))


def half_of_the_head_gradient(engine: Engine, size: float) -> None:
    """One matrix is embedding and head, and half of the head's gradient comes to it."""
    replace_forward(engine, HEAD, lambda module: lambda x: functional.linear(x, Scaled.apply(module.weight, 0.5)))


def gradient_through_an_mlp(engine: Engine, size: float) -> None:
    """The backward pass loses a tenth of what goes through one MLP."""

    def make(module: Any) -> Callable[..., Any]:
        right = module.forward
        return lambda given: Scaled.apply(right(given), 1 - size)

    replace_forward(engine, MLP, make)


def keys_without_a_gradient(engine: Engine, size: float) -> None:
    module = engine.model.get_submodule(f"{ATTENTION}.k_proj")
    module.register_forward_hook(lambda module, args, output: output.detach())


# ---- loss scales


def _policy(site: Site, change: Callable[[Any], None]) -> None:
    right = loss_scaler.LossScaler.__init__

    def init(self: Any, section: Any) -> None:
        right(self, section)
        change(self.policy)

    site.patch(loss_scaler.LossScaler, "__init__", init)


def grows_a_step_early(site: Site) -> None:
    _policy(site, lambda policy: setattr(policy, "_window", policy._window - 1))


def backs_off_by_four(site: Site) -> None:
    _policy(site, lambda policy: setattr(policy, "_FACTOR", 4.0))


# ---- copies


def _keeping(engine: Engine, module: str, kept: Callable[[int], bool]) -> None:
    """The weights of a module stay what they were in the steps that are `kept`."""
    parameters = list(engine.model.get_submodule(module).parameters())
    now = Counter(engine)

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def stepping(*args: Any, **options: Any) -> Any:
            before = [held(parameter).clone() for parameter in parameters]
            update = right(*args, **options)
            for parameter, old in zip(parameters, before, strict=True):
                held(parameter).copy_(old if kept(now.step) else held(parameter))
            return update

        return stepping

    around(engine, "step", make)


def copies_every_fourth_step(engine: Engine, size: float) -> None:
    _keeping(engine, "", lambda step: step % 4 > 0)


def frozen_embedding(engine: Engine, size: float) -> None:
    _keeping(engine, EMBEDDING, lambda step: True)


def half_a_weight_stale(site: Site) -> None:
    """On one rank the second half of a weight is that of the step before, as after a gather that came too early."""

    def plant(engine: Engine) -> None:
        now, kept = Counter(engine), dict[int, torch.Tensor]()

        def make(module: Any) -> Callable[..., Any]:
            def forward(given: torch.Tensor) -> torch.Tensor:
                weight = module.weight
                own = kept.setdefault(now.step, weight.detach().clone())
                half = len(own) // 2
                mixed = torch.cat([own[:half], kept.get(now.step - 1, own)[half:]])
                return functional.linear(given, weight + (mixed - own))

            return forward

        replace_forward(engine, LINEAR, make)

    if site.is_bad_rank:
        site.when_built(plant)


# ---- modules, their constants and what is between them


def constant(name: str, module: str, change: Callable[[Any], Any]) -> Callable[[Engine, float], None]:
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


def mask_leaks(site: Site) -> None:
    """All layers see the next token."""

    def wrong(config: Any, inputs_embeds: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        rows, length = inputs_embeds.shape[:2]
        return torch.ones(length, length, dtype=torch.bool).tril(1).expand(rows, 1, length, length)

    site.patch(modeling_llama, "create_causal_mask", wrong)


def documents_see_each_other(site: Site) -> None:
    """Positions begin anew in each document, and the mask does not."""
    right = modeling_llama.create_causal_mask

    def wrong(*args: Any, **options: Any) -> Any:
        return right(*args, **{**options, "position_ids": None})

    site.patch(modeling_llama, "create_causal_mask", wrong)


def positions_off_in_the_decoder(engine: Engine, size: float) -> None:
    """The decoder hands other positions to its rotary table, from the 16th token on one more."""

    def shift(module: Any, args: Any, options: Any) -> Any:
        positions = options["position_ids"]
        return args, {**options, "position_ids": positions + (positions >= 16)}

    engine.model.get_submodule(ROTARY).register_forward_pre_hook(shift, with_kwargs=True)


def positions_off_in_the_table(engine: Engine, size: float) -> None:
    """The same inside the table, from the 32nd token on."""

    def make(module: Any) -> Callable[..., Any]:
        right = module.forward
        return lambda x, position_ids: right(x, position_ids + (position_ids >= 32))

    replace_forward(engine, ROTARY, make)


def lost_between_blocks(engine: Engine, size: float) -> None:
    block = engine.model.get_submodule(LAYER)
    block.register_forward_pre_hook(lambda module, args: (args[0] * (1 - size), *args[1:]))


def larger_before_the_head(engine: Engine, size: float) -> None:
    engine.model.get_submodule(HEAD).register_forward_pre_hook(lambda module, args: (args[0] * (1 + size),))


def zero_head(engine: Engine, size: float) -> None:
    """One head of an attention gives nothing."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        output = sdpa(query, key, value, mask).clone()
        output[:, 1] = 0
        return output

    attention_of(engine, attend)


def centred_norm(engine: Engine, size: float) -> None:
    """An RMSNorm subtracts the mean, as a LayerNorm does."""

    def make(module: Any) -> Callable[..., Any]:
        right = module.forward
        return lambda given: right(given - given.mean(-1, keepdim=True))

    replace_forward(engine, NORM, make)


def norm_off_later(engine: Engine, size: float) -> None:
    """After the twelfth step."""
    _norm_where(engine, size, Counter(engine), lambda now, module: now.step > 12)


def norm_off_in_evaluations(engine: Engine, size: float) -> None:
    _norm_where(engine, size, None, lambda now, module: not module.training)


def _norm_where(engine: Engine, size: float, now: Any, where: Callable[[Any, Any], bool]) -> None:
    def make(module: Any) -> Callable[..., Any]:
        right = module.forward
        return lambda given: right(given) * (1 + size if where(now, module) else 1.0)

    replace_forward(engine, NORM, make)


def balance_lost(engine: Engine, size: float) -> None:
    """Routers are trained without the balancing loss."""
    router: Any = engine.router
    router._balance = 0.0


# ---- evaluations


def mean_of_batches(engine: Engine, size: float) -> None:
    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(batches: Any) -> Any:
            found = [right([batch]) for batch in batches]
            return found[0]._replace(loss=sum(each.loss for each in found) / len(found))

        return evaluate

    around(engine, "evaluate", make)


def last_batch_dropped(engine: Engine, size: float) -> None:
    around(engine, "evaluate", lambda right: lambda batches: right([*batches][:-1]))


def last_batch_twice(engine: Engine, size: float) -> None:
    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(batches: Any) -> Any:
            every = [*batches]
            return right([*every, every[-1]])

        return evaluate

    around(engine, "evaluate", make)


# ---- resuming


def moments_of_one_rank_lost(site: Site) -> None:
    def clear(state: dict[str, Any]) -> None:
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].zero_()

    if site.rank == BAD_RANK:
        site.when_built(lambda engine: after_load(engine, lambda: each_state(engine, clear)))


def clipping_lost_at_load(engine: Engine, size: float) -> None:
    def change() -> None:
        engine.deepspeed._config.gradient_clipping = 0.0
        if engine.stage:
            engine.deepspeed.optimizer.clip_grad = 0.0

    after_load(engine, change)
