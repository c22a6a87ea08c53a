"""Code run inside the processes of test_seq2seq.py, and the oracle in plain torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from config.resolved import Resolved
from tests.support.rows.seq2seq import SOURCE, TARGET
from tests.training.tasks import sft_cases
from tests.training.tasks.sft_cases import step, taken, trained_from, trained_plainly
from training.distributed import World
from training.session import session


def resolve(folder: Path, *, family: str = "t5", overrides: tuple[str, ...] = (), **options: Any) -> Resolved:
    """A training of the model of a family in `folder` on its rows."""
    given = (
        *("task=seq2seq", f"model.name_or_path={folder}/{family}", f"data.path={folder}/rows.jsonl"),
        *(f"data.sequence_length={SOURCE}", f"data.target_length={TARGET}"),
    )
    return sft_cases.resolve(folder, overrides=(*given, *overrides), **options)


def steps(world: World, *, folder: Path, **options: Any) -> dict[str, Any]:
    """Losses, norms and rows of some steps, and the masters before and after."""
    return taken(resolve(folder, **options), world, step)


def oracle(
    folder: Path, taken: dict[str, Any], *, family: str = "t5", adapter: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The same steps in plain torch: one row at a time, unpadded, shifted and judged by the model's own `labels`.

    taken: what `steps` found. adapter: arguments of the `LoraConfig` of plain `peft`; None: all weights are trained.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder / family)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder / family, dtype=torch.float32).train()
    if adapter is not None:
        model = trained_from(model, taken["before"], adapter)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]

    def backward(step: dict[str, Any]) -> dict[str, Any]:
        pairs = [
            [tokenizer(rows[number][field], return_tensors="pt").input_ids for field in ("prompt", "completion")]
            for number in step["rows"]
        ]
        count, total = sum(target.numel() for _, target in pairs), 0.0
        for source, target in pairs:
            loss = model(input_ids=source, labels=target).loss * target.numel() / count
            loss.backward()
            total += float(loss.detach())
        return {"loss": total, "tokens": sum(source.numel() + target.numel() for source, target in pairs)}

    return trained_plainly(model, taken["steps"], backward)


def mixture(world: World, *, folder: Path, **options: Any) -> dict[str, Any]:
    """The first step on several sources with its rows by source, and each validation set; from the weights as read."""
    with session(resolve(folder, **options), world=world) as opened:
        engine, batch, mix = opened.engine, opened.batches.next_step(), opened.corpus.mixture
        assert mix is not None
        health = engine.health(engine.forward_backward(batch, step=1))
        engine.discard_gradients()
        owners = mix.source_of(batch.sample_ids).tolist()
        firsts = [0, *np.cumsum(mix.samples).tolist()]
        rows: dict[str, list[int]] = {name: [] for name in mix.names}
        for sample, owner in zip(batch.sample_ids.tolist(), owners, strict=True):
            [row] = opened.corpus.train.rows_of(sample)  # type: ignore[union-attr]
            rows[mix.names[owner]].append(row - firsts[owner])
        return {
            "loss": health.loss,
            "loss_by_source": health.loss_by_source,
            "labels": [batch.labels_by_source, health.counts_by_source],
            "rows": rows,
            "chunked": engine.loss_path.chunked,
            "whole": engine.evaluate(opened.validation()).loss,
            "sets": {name: engine.evaluate(own) for name, own in opened.validation_by_source().items()},
        }


def plain_losses(folder: Path, family: str, rows: list[dict[str, str]]) -> torch.Tensor:
    """(3,) float64: summed cross-entropy of the targets, their tokens, and those of them that are the likeliest; of
    plain transformers, one row at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder / family)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder / family, dtype=torch.float32).eval()
    found = torch.zeros(3, dtype=torch.float64)
    for row in rows:
        source, target = (tokenizer(row[field], return_tensors="pt").input_ids for field in ("prompt", "completion"))
        with torch.no_grad():
            output = model(input_ids=source, labels=target)
        right = int((output.logits.argmax(-1) == target).sum())
        found += torch.tensor([float(output.loss) * target.numel(), target.numel(), right], dtype=torch.float64)
    return found
