"""What runs inside the processes of test_mlm.py, and the oracle in plain torch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForMaskedLM

from config.schema import OptimizerSection
from data.loader import IGNORED_LABEL
from modeling.parameter_groups import parameter_groups
from tests.support.labelled import words
from tests.training.tasks import classify_cases
from tests.training.tasks.sft_cases import CLIPPING, RATE, taken
from training.distributed import World
from training.session import Session, session

LENGTH = 32


def write_text(folder: Path, documents: int, *, seed: int = 0) -> Path:
    """So many text files of a few lines."""
    draw = random.Random(seed)
    folder.mkdir()
    for number in range(documents):
        lines = [" ".join(words(draw, 20)) for _ in range(draw.randint(2, 10))]
        (folder / f"{number:03}.txt").write_text("\n".join(lines))
    return folder


def mlm(folder: Path, *overrides: str) -> tuple[str, ...]:
    """Overrides of a classification's config that make it masked language modelling of the texts in `folder`."""
    given = ("task=mlm", "data.source=text", f"data.path={folder}/text", f"data.sequence_length={LENGTH}")
    return (*given, "data.validation_fraction=0.2", *overrides)


def steps(world: World, *, folder: Path, stage: int, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Losses, norms, what every rank saw, and the masters before and after."""
    return taken(classify_cases.resolve(folder, stage=stage, overrides=mlm(folder, *overrides)), world, _step)


def _step(opened: Session) -> dict[str, Any]:
    engine, batch = opened.engine, opened.batches.next_step()
    health = engine.health(engine.forward_backward(batch, step=batch.position + 1))
    assert engine.step(health, RATE).applied
    mine = (batch.input_ids.flatten(0, 1), batch.labels.flatten(0, 1))
    parts = zip(*opened.world.gather_objects(mine), strict=True)
    seen, labels = (torch.cat(list(part)) for part in parts)
    return {"loss": health.loss, "grad_norm": health.grad_norm, "seen": seen, "labels": labels}


def oracle(folder: Path, model: str, found: dict[str, Any], adapter: dict[str, Any] | None = None) -> dict[str, Any]:
    """The same steps in plain torch: one sequence at a time. adapter: as of `classify_cases.oracle`."""
    net = AutoModelForMaskedLM.from_pretrained(folder / model, dtype=torch.float32)
    net = classify_cases.trained_from(net, found["before"], adapter)
    parameters = {name: item for name, item in net.named_parameters() if item.requires_grad}
    groups = parameter_groups(net, OptimizerSection(weight_decay=0.1))
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    steps = []
    for step in found["steps"]:
        count, total = int((step["labels"] != IGNORED_LABEL).sum()), 0.0
        for seen, labels in zip(step["seen"], step["labels"], strict=True):
            logits = net(input_ids=seen[None]).logits[0].float()
            loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
            (loss / count).backward()
            total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), CLIPPING))
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"loss": total / count, "grad_norm": norm})
    return {"steps": steps, "after": {name: parameter.detach().clone() for name, parameter in parameters.items()}}


def validation(world: World, *, folder: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """The validation loss twice, with steps of training between, and what is hidden in its sequences by sample."""
    resolved = classify_cases.resolve(folder, overrides=mlm(folder, *overrides))
    with session(resolved, world=world) as opened:
        hidden = []
        for _ in range(2):
            batches = list(opened.validation())
            hidden.append(torch.cat([batch.input_ids.flatten(0, 1) for batch in batches]))
            opened.batches.next_step()
        losses = [opened.engine.evaluate(opened.validation()) for _ in range(2)]
        rows = opened.world.gather_objects(hidden[0])
        return {"losses": losses, "same": bool((hidden[0] == hidden[1]).all()), "rows": torch.cat(rows)}
