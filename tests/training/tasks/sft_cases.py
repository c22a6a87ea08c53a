"""Code run inside the processes of test_sft.py, and the oracle in plain torch."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.errors import UserError
from config.resolved import Resolved
from config.schema import OptimizerSection
from data.batches.loader import Batch
from data.corpora.corpus import Corpus
from data.corpora.row_shards import RowShards
from data.sources import sources
from modeling.parameter_groups import parameter_groups
from tests.support.rows.chats import LENGTH, SHAPE
from training import session as session_module
from training.distributed import World
from training.engine.ledger import PrecisionError, read_ledger
from training.engine.tensors import trainable_parameters, whole_master
from training.session import Session, session
from training.tasks.task import prepare
from training.telemetry import Telemetry

STEPS = 3
GLOBAL = 8
RATE = 0.01
CLIPPING = 0.5
SEED = 0
LORA = "adapter={kind: lora, r: 4, alpha: 8}"
GIVEN = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
"""The same for plain `peft`."""


def resolve(folder: Path, *, stage: int = 2, compute: str = "fp32", overrides: tuple[str, ...] = ()) -> Resolved:
    """A fine-tuning of the base in `folder` on its chats."""
    return read_command_line(
        [
            *("--config", f"{REPOSITORY}/config/recipes/demo.yaml", "task=sft"),
            *(f"run.dir={folder}/runs", "run.resume=auto", "run.steps=6"),
            *("model.architecture=null", "model.config={}", "model.activation_checkpointing=none"),
            *(f"model.name_or_path={folder}/base", f"data.path={folder}/chats.jsonl", f"data.cache_dir={folder}/cache"),
            *("data.source=auto", "data.tokenizer=model", f"data.sequence_length={LENGTH}"),
            *("data.validation_fraction=0", f"batch.global_size={GLOBAL}", "batch.micro_size=2"),
            *(f"optimizer.learning_rate={RATE}", f"optimizer.gradient_clipping={CLIPPING}"),
            *("schedule={name: constant, warmup_steps: 0}", f"precision.compute={compute}", f"deepspeed.stage={stage}"),
            *("evaluate.every_steps=0", "checkpoint.every_steps=0", "tracking.wandb=disabled", "generate.tokens=0"),
            *overrides,
        ]
    )


def steps(world: World, *, folder: Path, **options: Any) -> dict[str, Any]:
    """Losses, norms and rows of some steps, and the masters before and after."""
    return taken(resolve(folder, **options), world, _step)


def saved(world: World, *, folder: Path, to: Path, **options: Any) -> dict[str, int]:
    """Save DeepSpeed's checkpoint after a step; how many values each trained parameter has, by name."""
    with session(resolve(folder, **options), world=world) as opened:
        _step(opened)
        opened.engine.save(to, "deepspeed")
        return {name: master.numel() for name, master in masters(opened).items()}


def taken(resolved: Resolved, world: World, step: Callable[[Session], dict[str, Any]]) -> dict[str, Any]:
    """The results of `step` for some steps, the masters before and after each, and whether the loss is chunked."""
    with session(resolved, world=world, shares=("sequence", "expert")) as opened:
        before = masters(opened)
        found = [step(opened) for _ in range(STEPS)]
        chunked = opened.engine.loss_path.chunked
        return {"steps": found, "before": before, "after": masters(opened), "chunked": chunked}


def evaluated(world: World, *, folder: Path, **options: Any) -> tuple[float, float]:
    """The loss of the validation set, and of the first training batch before that."""
    with session(resolve(folder, **options), world=world) as opened:
        engine = opened.engine
        health = engine.health(engine.forward_backward(opened.batches.next_step(), step=1))
        engine.discard_gradients()
        return engine.evaluate(opened.validation()).loss, health.loss


def own_identity(world: World, *, folder: Path) -> dict[str, Any] | str:
    """The identity of a run whose ranks prepare a file of their own, known by its time, in a cache of their own; why it
    is refused."""
    own = f"{folder}/{world.rank}"
    overrides = (f"data.path={own}/chats.jsonl", f"data.cache_dir={own}/cache")
    try:
        with (
            patch.object(sources, "HASHED_BYTES", 0),
            session(resolve(folder, overrides=overrides), world=world) as opened,
        ):
            return opened.identity
    except UserError as refused:
        return str(refused)


def after_a_slow_preparation(world: World, *, folder: Path) -> str:
    """The corpus of a run whose second rank prepares for longer than a collective of training waits."""

    def slow(*arguments: Any, **named: Any) -> Corpus:
        corpus = prepare(*arguments, **named)
        time.sleep(4 * world.rank)
        return corpus

    impatient = replace(world, group=dist.new_group(timeout=timedelta(seconds=2)))
    with (
        patch.object(session_module, "prepare", slow),
        session(resolve(folder), world=impatient, trains=True) as opened,
    ):
        return opened.corpus.fingerprint


def masters(opened: Session) -> dict[str, torch.Tensor]:
    """Every master, whole, by name. A collective."""
    engine = opened.engine
    return {name: whole_master(engine, parameter) for name, parameter in trainable_parameters(engine).items()}


def step(opened: Session, batch: Batch | None = None) -> dict[str, Any]:
    """Take a step, on the next batch unless one is given: what was measured, and the rows of a task that has rows."""
    engine, train = opened.engine, opened.corpus.train
    batch = batch or opened.batches.next_step()
    health = engine.health(engine.forward_backward(batch, step=batch.position + 1))
    assert engine.step(health, RATE).applied
    found = {"loss": health.loss, "grad_norm": health.grad_norm, "tokens": batch.tokens, "metrics": health.metrics}
    if isinstance(train, RowShards):
        found["rows"] = [row for sample in batch.sample_ids for row in train.rows_of(int(sample))]
    return found


def _step(opened: Session) -> dict[str, Any]:
    batch, train = opened.batches.next_step(), opened.corpus.train
    assert isinstance(train, RowShards)
    noise_names = []
    for sample in batch.sample_ids:
        start = 0
        for row in train.rows_of(int(sample)):
            noise_names.append((f"{SEED}/{sample}/{batch.position}", start))
            start += len(train.row(row)[0]) - 1
    return step(opened, batch) | {"noise_names": noise_names}


def trained_plainly(
    model: Any, steps: Iterable[Any], backward: Callable[[Any], dict[str, Any]], *, eps: float = 1e-8
) -> dict[str, Any]:
    """Train `model` in place in plain torch, by the gradients that `backward` leaves for each of `steps`.

    What `backward` returned of each step with its gradient norm, and the trained parameters afterwards. eps: of AdamW.
    """
    groups = parameter_groups(model, OptimizerSection(weight_decay=0.1))
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=eps)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = []
    for step in steps:
        measured = backward(step)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), CLIPPING))
        optimizer.step()
        optimizer.zero_grad()
        found.append({"grad_norm": norm} | measured)
    return {"steps": found, "after": {name: parameter.detach().clone() for name, parameter in parameters.items()}}


def oracle(
    folder: Path,
    found: dict[str, Any],
    model: Any = None,
    *,
    adapter: dict[str, Any] | None = None,
    by_row: bool = False,
    noise: Any = None,
    eps: float = 1e-8,
) -> dict[str, Any]:
    """The steps of `found` in plain torch: one row at a time, unpadded, labels derived from the shape's description.

    adapter: arguments of a `LoraConfig`, for plain `peft`. by_row: the mean over rows of each row's mean, in place of
    the mean over labels. noise: called with the numbers of a step and of one of its rows and the shape of its
    embeddings, which it is added to. eps: of AdamW.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    model = model_of(folder, found, adapter) if model is None else model.train()
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text().splitlines()]

    def backward(step: tuple[int, list[int]]) -> dict[str, Any]:
        rows = [labelled(tokenizer, chats[number]) for number in step[1]]
        counts = [int((labels[1:] != -100).sum()) for _, labels in rows]
        total = of_labels = 0.0
        for row, ((ids, labels), count) in enumerate(zip(rows, counts, strict=True)):
            embedded = model.get_input_embeddings()(ids[None, :-1])
            if noise is not None:
                embedded = embedded + noise(step[0], row, embedded.shape[1:])
            logits = model(inputs_embeds=embedded, use_cache=False).logits[0].float()
            loss = torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
            share = loss / (count * len(rows)) if by_row else loss / sum(counts)
            share.backward()
            total += float(share.detach())
            of_labels += float(loss.detach()) / sum(counts)
        return {"loss": total, "tokens": sum(len(ids) - 1 for ids, _ in rows), "token_loss": of_labels}

    rows_of_steps = [step["rows"] for step in found["steps"]]
    return trained_plainly(model, enumerate(rows_of_steps), backward, eps=eps)


def labelled(tokenizer: Any, turns: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(n,) ids of a conversation, and (n,) the ids that are trained, -100 elsewhere."""
    ids: list[int] = []
    labels: list[int] = []
    for text, learned in SHAPE.segments(turns):
        part = tokenizer(text, add_special_tokens=False).input_ids
        ids += part
        labels += part if learned else [-100] * len(part)
    whole = tokenizer("".join(text for text, _ in SHAPE.segments(turns)), add_special_tokens=False).input_ids
    assert ids == whole, "the chats were made so that no token straddles a turn"
    return torch.tensor(ids), torch.tensor(labels)


def trained_from(model: Any, before: dict[str, torch.Tensor], adapter: dict[str, Any] | None) -> Any:
    """The model in training from the weights `before`, with the adapter that plain `peft` puts into it.

    adapter: arguments of its `LoraConfig`; None: all weights are trained.
    """
    if adapter is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**adapter)).get_base_model()
    model.load_state_dict(before, strict=False)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == before.keys()
    return model.train()


def model_of(folder: Path, found: dict[str, Any], adapter: dict[str, Any] | None) -> Any:
    """The base; with an adapter under plain `peft`, at the values that `found` began with, by Mantissa's names."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).train()
    return model if adapter is None else trained_from(model, found["before"], {"task_type": "CAUSAL_LM", **adapter})


def ledger(world: World, *, folder: Path, **options: Any) -> list[Any]:
    """The ledger after a step."""
    with session(resolve(folder, **options), world=world) as opened:
        step(opened)
        return read_ledger(opened.engine, reduce="fp32")


def with_a_frozen_gradient(world: World, *, folder: Path, **options: Any) -> str:
    """The ledger's complaint when a frozen weight has a gradient."""
    with session(resolve(folder, **options), world=world) as opened:
        frozen = next(p for p in opened.engine.model.parameters() if not p.requires_grad)
        frozen.grad = torch.zeros_like(frozen)
        try:
            read_ledger(opened.engine, reduce="fp32")
        except PrecisionError as error:
            return str(error)
    return ""


def regions(world: World, *, resolve: Any = resolve, folder: Path, **options: Any) -> dict[str, Any]:
    """The dtype of each region under a manifest, and the losses of some steps."""
    with session(resolve(folder, compute="auto", **options), world=world) as opened:
        losses = [step(opened)["loss"] for _ in range(STEPS)]
        assert opened.engine.regions is not None
        return {"dtypes": dict(opened.engine.regions.dtypes), "losses": losses}


def mixture(world: World, *, folder: Path, count: int, first: int = 0, **options: Any) -> list[dict[str, Any]]:
    """Some global batches of a mixture of two from position `first` on, and the validation loss by source.

    The last entry has of each batch also `trained`, its loss as a whole and by source with the start weights, and
    `rows`, of each source the (tokens, which of them are labels); `held_out` has those of the validation sets.
    """
    with session(resolve(folder, **options), world=world) as opened:
        opened.batches.restore(first)
        engine, train, mix = opened.engine, opened.corpus.train, opened.corpus.mixture
        assert isinstance(train, RowShards) and mix is not None
        found, trained, rows = [], [], []
        for _ in range(count):
            batch = opened.batches.next_step()
            assert batch.labels_by_source is not None
            found.append({"ids": batch.sample_ids.tolist(), "labels": batch.labels_by_source})
            mine = engine.world.sum(engine.world.numbers([batch.label_tokens]))
            assert int(mine) == batch.label_tokens_of_all
            assert opened.resolved.config.sft.loss == "row" or int(mine) == sum(batch.labels_by_source.values())
            health = engine.health(engine.forward_backward(batch, step=1))
            engine.discard_gradients()
            trained.append({"all": health.loss, **health.loss_by_source})
            sides = [[sample for sample in batch.sample_ids if (sample >= mix.samples[0]) == side] for side in (0, 1)]
            rows.append([[row for sample in side for row in train.sequence(int(sample))] for side in sides])
        losses = {name: engine.evaluate(own).loss for name, own in opened.validation_by_source().items()}
        held_out = {
            name: [row for number in range(split.sequences(LENGTH)) for row in split.sequence(number)]
            for name, split in opened.corpus.validation_by_source.items()
            if isinstance(split, RowShards)
        }
        also = {"trained": trained, "rows": rows, "held_out": held_out}
        return [*found, {"shares": mix.shares(), "losses": losses, **also}]


def mean_loss(model: Any, rows: list[tuple[Any, Any]], *, by_row: bool = False) -> float:
    """Mean cross-entropy at every label of some rows, each (tokens, which of them are labels), one row at a time.

    by_row: the mean of each row's mean.
    """
    if by_row:
        return sum(mean_loss(model, [row]) for row in rows) / len(rows)
    total, count = 0.0, 0
    for tokens, trained in rows:
        ids = torch.tensor(tokens.astype("int64"))
        with torch.no_grad():
            log_probs = model(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1)
        picked = -log_probs[torch.arange(len(ids) - 1), ids[1:]][torch.tensor(trained[1:].astype(bool))]
        total, count = total + float(picked.sum()), count + len(picked)
    return total / count


def lost_updates(world: World, *, folder: Path, rate: float, **options: Any) -> dict[str, Any]:
    """The meter's report on the second step, and the whole masters before and after it."""
    with session(resolve(folder, **options), world=world) as opened:
        step(opened)
        engine, batch = opened.engine, opened.batches.next_step()
        meter, before = Telemetry(engine, probe=False), masters(opened)
        with meter.watching(batch):
            outcome = engine.forward_backward(batch, step=2)
        health = engine.health(outcome)
        meter.measure()
        assert engine.step(health, rate).applied
        return {"said": meter.finish(applied=True)["lost_updates"], "before": before, "after": masters(opened)}


def sets(world: World, *, resolve: Any = resolve, folder: Path, **options: Any) -> dict[str, Any]:
    """Loss and metrics of each validation set, the evaluation of all, the first step, the ledger, and how many rows are
    trained on."""
    with session(resolve(folder, **options), world=world) as opened:
        engine = opened.engine
        evaluations = {name: engine.evaluate(own) for name, own in opened.validation_by_source().items()}
        found = {name: evaluation.loss for name, evaluation in evaluations.items()}
        metrics = {name: evaluation.metrics for name, evaluation in evaluations.items()}
        whole, batch = engine.evaluate(opened.validation()), opened.batches.next_step()
        health = engine.health(engine.forward_backward(batch, step=1))
        engine.discard_gradients()
        found = {"sets": found, "metrics": metrics, "whole": whole.loss, "held out": whole}
        found |= {"step": health.loss, "norm": health.grad_norm, "of step": health.metrics}
        found["of source"] = health.loss_by_source
        found["ledger"] = {row.what: row.dtype for row in read_ledger(engine, reduce="fp32")}
        return found | {"ids": batch.sample_ids.tolist(), "rows": opened.corpus.train_documents}
