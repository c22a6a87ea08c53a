"""Code run inside the processes of test_classify.py, and the oracle in plain torch."""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForMaskedLM

from data.batches.loader import IGNORED_LABEL
from tests.support.rows.labelled import words
from tests.training.tasks import classify_cases
from tests.training.tasks.sft_cases import step, taken, trained_from, trained_plainly
from training.distributed import World
from training.session import Session, session

LENGTH = 32


def write_text(folder: Path, documents: int, *, seed: int = 0) -> Path:
    """Write this many text files of a few lines."""
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
    batch = opened.batches.next_step()
    found = step(opened, batch)
    mine = (batch.input_ids.flatten(0, 1), batch.labels.flatten(0, 1))
    parts = zip(*opened.world.gather_objects(mine), strict=True)
    seen, labels = (torch.cat(list(part)) for part in parts)
    return found | {"seen": seen, "labels": labels}


def oracle(folder: Path, model: str, found: dict[str, Any], adapter: dict[str, Any] | None = None) -> dict[str, Any]:
    """The same steps in plain torch: one sequence at a time. adapter: as of `trained_from`."""
    net = AutoModelForMaskedLM.from_pretrained(folder / model, dtype=torch.float32)
    net = trained_from(net, found["before"], adapter)

    def backward(step: dict[str, Any]) -> dict[str, Any]:
        count, total = int((step["labels"] != IGNORED_LABEL).sum()), 0.0
        for seen, labels in zip(step["seen"], step["labels"], strict=True):
            logits = net(input_ids=seen[None]).logits[0].float()
            loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
            (loss / count).backward()
            total += float(loss.detach())
        return {"loss": total / count}

    return trained_plainly(net, found["steps"], backward)


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
