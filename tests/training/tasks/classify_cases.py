"""What runs inside the processes of test_classify.py, and the oracle in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.resolved import Resolved
from config.schema import OptimizerSection
from data.row_shards import RowShards
from modeling.parameter_groups import parameter_groups
from tests.support.labelled import LABELS, LENGTH
from tests.training.tasks.sft_cases import CLIPPING, GLOBAL, RATE, STEPS, masters, taken
from training.distributed import World
from training.session import Session, session

AUTO = {
    "sequence": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
}


def resolve(
    folder: Path, *, kind: str = "sequence", stage: int = 2, compute: str = "fp32", overrides: tuple[str, ...] = ()
) -> Resolved:
    """A classification by the encoder in `folder` of its rows of one kind."""
    return read_command_line(
        [
            "--config",
            str(REPOSITORY / "config/recipes/demo.yaml"),
            "task=classify",
            f"classify.kind={kind}",
            f"run.dir={folder}/runs",
            "run.resume=auto",
            "run.steps=6",
            "model.architecture=null",
            "model.config={}",
            f"model.name_or_path={folder}/bert",
            "model.activation_checkpointing=none",
            "data.source=auto",
            f"data.path={folder}/{kind}.jsonl",
            "data.tokenizer=model",
            f"data.sequence_length={LENGTH}",
            "data.validation_fraction=0",
            f"data.cache_dir={folder}/cache",
            f"batch.global_size={GLOBAL}",
            "batch.micro_size=2",
            f"optimizer.learning_rate={RATE}",
            f"optimizer.gradient_clipping={CLIPPING}",
            "schedule={name: constant, warmup_steps: 0}",
            f"precision.compute={compute}",
            f"deepspeed.stage={stage}",
            "evaluate.every_steps=0",
            "checkpoint.every_steps=0",
            "tracking.wandb=disabled",
            *overrides,
        ]
    )


def steps(world: World, *, folder: Path, **options: Any) -> dict[str, Any]:
    """Losses, norms, metrics and rows of some steps, and the masters before and after."""
    return taken(resolve(folder, **options), world, _step)


def _step(opened: Session) -> dict[str, Any]:
    engine, batch, train = opened.engine, opened.batches.next_step(), opened.corpus.train
    assert isinstance(train, RowShards)
    health = engine.health(engine.forward_backward(batch, step=batch.position + 1))
    assert engine.step(health, RATE).applied
    rows = [row for sample in batch.sample_ids for row in train.rows_of(int(sample))]
    return {
        "loss": health.loss,
        "grad_norm": health.grad_norm,
        "metrics": health.metrics,
        "rows": rows,
    }


def oracle(
    folder: Path,
    found: dict[str, Any],
    *,
    kind: str,
    model: str = "bert",
    pair: bool = False,
    adapter: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The same steps in plain torch: one row at a time, unpadded, tokenized word by word, from the weights `before`.

    adapter: arguments of a `LoraConfig`, for plain `peft`.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder / model)
    names = ["number"] if kind == "regression" else sorted(LABELS)
    net: Any = getattr(transformers, AUTO[kind]).from_pretrained(
        folder / model, dtype=torch.float32, num_labels=len(names)
    )
    net = trained_from(net, found["before"], adapter)
    rows = [json.loads(line) for line in (folder / f"{kind}.jsonl").read_text().splitlines()]
    parameters = {name: item for name, item in net.named_parameters() if item.requires_grad}
    optimizer = torch.optim.AdamW(
        parameter_groups(net, OptimizerSection(weight_decay=0.1)), lr=RATE, betas=(0.9, 0.95), eps=1e-8
    )
    steps = []
    for step in found["steps"]:
        total, count, predicted, there = 0.0, 0, [], []
        losses = []
        for number in step["rows"]:
            inputs, target = example(tokenizer, rows[number], kind, names, pair=pair)
            logits = net(**inputs).logits.float()
            if kind == "regression":
                losses.append((logits.view(()) - target) ** 2)
                guess, real = [float(logits.detach())], [float(target)]
            else:
                logits = logits.reshape(-1, len(names))
                losses.append(torch.nn.functional.cross_entropy(logits, target, ignore_index=-100, reduction="sum"))
                keep = target != -100
                guess, real = logits.detach().argmax(-1)[keep].tolist(), target[keep].tolist()
            count += len(real)
            predicted += guess
            there += real
        total = torch.stack(losses).sum() / count
        total.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), CLIPPING))
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"loss": float(total.detach()), "grad_norm": norm, "predicted": predicted, "there": there})
    return {"steps": steps, "after": {name: parameter.detach().clone() for name, parameter in parameters.items()}}


def trained_from(net: Any, before: dict[str, torch.Tensor], adapter: dict[str, Any] | None) -> Any:
    """The model in training from the weights `before`, with the adapter that plain `peft` puts into it."""
    if adapter is not None:
        from peft import LoraConfig, get_peft_model

        net = get_peft_model(net, LoraConfig(**adapter)).get_base_model()
    net.load_state_dict(before, strict=False)
    assert {name for name, item in net.named_parameters() if item.requires_grad} == before.keys()
    return net.train()


def example(
    tokenizer: Any, row: dict[str, Any], kind: str, names: list[str], *, pair: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A row as the model's inputs and what is to be predicted, from the rules of transformers' own examples."""
    if kind == "token":
        found = tokenizer(row["tokens"], is_split_into_words=True, return_tensors="pt")
        target, before = [], None
        for word in found.word_ids():
            new = word is not None and word != before
            target.append(names.index(row["tags"][word]) if new else -100)
            before = word
        return dict(found), torch.tensor(target)
    found = tokenizer(row["text"], *([row["other"]] if pair else []), return_tensors="pt")
    if kind == "regression":
        return dict(found), torch.tensor(row["label"])
    return dict(found), torch.tensor([names.index(row["label"])])


def evaluate(world: World, *, folder: Path, **options: Any) -> dict[str, Any]:
    """Loss and metrics of the validation set, and the masters."""
    with session(resolve(folder, **options), world=world) as opened:
        found = opened.engine.evaluate(opened.validation())
        return {
            "loss": found.loss,
            "perplexity": found.perplexity,
            "metrics": found.metrics,
            "weights": masters(opened),
            "held out": opened.corpus.validation.sequences(LENGTH),
            "left out": opened.left_out,
        }


def parity_steps(world: World, *, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Two steps, each compared with FP32 module by module."""
    from tools.parity.reference import Reference
    from tools.parity.steps import StepParity

    with session(resolve(folder, **options), world=world) as opened:
        resolved = opened.resolved
        parity = StepParity(opened.engine, Reference(resolved, opened.model_config, world), resolved)
        return [parity.step(opened.batches.next_step(), applied=step) for step in range(2)]


def generators_after_the_reference(world: World, *, folder: Path, **options: Any) -> bool:
    """Whether a run's random numbers go on as if no FP32 reference had been built."""
    from tools.parity.reference import Reference

    with session(resolve(folder, **options), world=world) as opened:
        before = torch.get_rng_state()
        Reference(opened.resolved, opened.model_config, world)
        return torch.equal(before, torch.get_rng_state())


def telemetry(world: World, *, folder: Path, **options: Any) -> dict[str, Any]:
    """What is measured on the first step, with the probe."""
    from training.telemetry import Telemetry

    with session(resolve(folder, **options), world=world) as opened:
        meter, batch = Telemetry(opened.engine, probe=True), opened.batches.next_step()
        with meter.watching(batch):
            outcome = opened.engine.forward_backward(batch, step=1)
        opened.engine.health(outcome)
        meter.measure()
        return meter.finish(applied=False)


def causes(world: World, *, folder: Path, **options: Any) -> list[tuple[int, Any]]:
    """Who made the first step not finite."""
    from training.attribution import attribute

    with session(resolve(folder, **options), world=world) as opened:
        batch = opened.batches.next_step()
        outcome = opened.engine.forward_backward(batch, step=1)
        assert not opened.engine.health(outcome).finite
        return attribute(opened.engine, batch, outcome, step=1)


def regions(world: World, *, folder: Path, **options: Any) -> dict[str, Any]:
    """The dtype of each region under a manifest, and the losses of some steps."""
    with session(resolve(folder, compute="auto", **options), world=world) as opened:
        losses = [_step(opened)["loss"] for _ in range(STEPS)]
        assert opened.engine.regions is not None
        return {"dtypes": dict(opened.engine.regions.dtypes), "losses": losses}


def surveyed(world: World, *, folder: Path, **options: Any) -> dict[str, Any]:
    """What `tools.analyze` measures and proposes."""
    from tools.analyze.proposal import Limits
    from tools.analyze.survey import Plan, survey

    with session(resolve(folder, compute="auto", **options), world=world) as opened:
        plan = Plan(steps=1, sequences=2, most_regions=4, held_out=1, limits=Limits())
        return survey(opened.engine, opened.batches, opened.resolved, plan)


def start(world: World, *, folder: Path, **options: Any) -> dict[str, Any]:
    """The masters and the notes of a run that has just started."""
    with session(resolve(folder, **options), world=world) as opened:
        return {"masters": masters(opened), "notes": opened.engine.notes, "config": opened.model_config.to_dict()}


def mixture(world: World, *, folder: Path, **options: Any) -> dict[str, Any]:
    """The first step on several sources: its losses, labels and samples, and the validation loss by source."""
    with session(resolve(folder, **options), world=world) as opened:
        engine, batch, mix, before = opened.engine, opened.batches.next_step(), opened.corpus.mixture, masters(opened)
        assert mix is not None
        health = engine.health(engine.forward_backward(batch, step=1))
        engine.discard_gradients()
        mine = {name: getattr(batch, name).flatten(0, 1) for name in ("input_ids", "labels")}
        return {
            "loss": health.loss,
            "loss_by_source": health.loss_by_source,
            "labels_by_source": batch.labels_by_source,
            "counts_by_source": health.counts_by_source,
            "samples": [batch.sample_ids[batch.sample_ids < mix.samples[0]], batch.sample_ids],
            "first": mix.samples[0],
            "names": list(opened.resolved.config.classify.labels),
            "before": before,
            "seen": [(*mine.values(), batch.sources.flatten() if batch.sources is not None else None)],
            "held out": {name: engine.evaluate(own).loss for name, own in opened.validation_by_source().items()},
        }
