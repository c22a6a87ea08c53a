"""Code run inside the processes of test_classify.py, and the oracle in plain torch."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from config.resolved import Resolved
from tests.support.rows.labelled import LABELS, LENGTH
from tests.training.tasks import sft_cases
from tests.training.tasks.sft_cases import masters, step, taken, trained_from, trained_plainly
from training.distributed import World
from training.session import session

AUTO = {
    "sequence": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
}


def resolve(folder: Path, *, kind: str = "sequence", overrides: tuple[str, ...] = (), **options: Any) -> Resolved:
    """A classification by the encoder in `folder` of its rows of one kind."""
    given = ("task=classify", f"classify.kind={kind}", f"data.path={folder}/{kind}.jsonl")
    given = (*given, f"model.name_or_path={folder}/bert", f"data.sequence_length={LENGTH}")
    return sft_cases.resolve(folder, overrides=(*given, *overrides), **options)


def steps(world: World, *, folder: Path, **options: Any) -> dict[str, Any]:
    """Losses, norms, metrics and rows of some steps, and the masters before and after."""
    return taken(resolve(folder, **options), world, step)


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

    def backward(step: dict[str, Any]) -> dict[str, Any]:
        predicted, there, losses = [], [], []
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
            predicted += guess
            there += real
        loss = torch.stack(losses).sum() / len(there)
        loss.backward()
        return {"loss": float(loss.detach()), "predicted": predicted, "there": there}

    return trained_plainly(net, found["steps"], backward)


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


def generators_after_the_reference(world: World, *, folder: Path, **options: Any) -> bool:
    """Whether a run's random numbers go on as if no FP32 reference had been built."""
    from tools.parity.reference import Reference

    with session(resolve(folder, **options), world=world) as opened:
        before = torch.get_rng_state()
        Reference(opened.resolved, opened.model_config, world)
        return torch.equal(before, torch.get_rng_state())


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
