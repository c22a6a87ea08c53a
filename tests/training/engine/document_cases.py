"""Packed documents through the engine; run on real ranks by test_document_masking.py."""

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch.nn import functional

from data.batches.loader import IGNORED_LABEL, Batch
from data.corpora.documents import document_positions
from tests.support.models.flex_on_cpu import flex_on_cpu
from tests.support.models.small_run import (
    SEQUENCE,
    VOCABULARY,
    batch_of,
    engine_of,
    masters_of,
    plain_model,
    resolve,
)
from training.distributed import World

END = 1


def packed(world: World, *, rank: int | None = None) -> Batch:
    """A rank's part of the global batch of `batch_of`, cut into documents wherever END happens to stand, or every 5."""
    there = world if rank is None else replace(world, rank=rank)
    batch = batch_of(there, 4, seed=3)
    ids, labels = batch.input_ids.clone(), batch.labels.clone()
    ids[..., 4::5] = END
    labels[ids == END] = IGNORED_LABEL
    positions = document_positions(ids.reshape(-1, SEQUENCE).numpy(), END)
    return replace(
        batch,
        input_ids=ids,
        labels=labels,
        label_tokens=int((labels != IGNORED_LABEL).sum()),
        position_ids=torch.from_numpy(positions).reshape(ids.shape),
    )


def against_separate_documents(
    world: World, *, stage: int, compute: str, loss: str = "full", attention: str = "sdpa"
) -> dict[str, float]:
    """Loss and norm of the engine on packed documents, and of plain FP32 torch on each document alone."""
    overrides = ["data.document_masking=true", f"model.loss={loss}", f"model.attention={attention}"]
    resolved = resolve(world, stage=stage, compute=compute, overrides=overrides)
    flex = flex_on_cpu() if attention == "flex_attention" else nullcontext()
    with flex, engine_of(world, resolved) as engine:
        plain = plain_model(resolved, masters_of(engine))
        batch = packed(world)
        health = engine.health(engine.forward_backward(batch, step=1))
        evaluated = engine.evaluate([batch]).loss
    total, tokens = torch.zeros(()), 0
    for rank in range(world.world_size):
        whole = packed(world, rank=rank)
        rows = zip(whole.input_ids.reshape(-1, SEQUENCE), whole.labels.reshape(-1, SEQUENCE), strict=True)
        for ids, labels in rows:
            for at in range(0, SEQUENCE, 5):  # the definition, not what is tested
                ends = [at + i for i in range(len(ids[at : at + 5])) if ids[at + i] == END]
                start = at
                for end in [*ends, at + len(ids[at : at + 5]) - 1]:
                    if end < start:
                        continue
                    logits = plain(input_ids=ids[start : end + 1].unsqueeze(0), use_cache=False).logits[0]
                    wanted = labels[start : end + 1]
                    total = total + functional.cross_entropy(
                        logits, wanted, ignore_index=IGNORED_LABEL, reduction="sum"
                    )
                    start = end + 1
        tokens += whole.label_tokens
    mean = total / tokens
    mean.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    return {
        "loss": health.loss,
        "norm": health.grad_norm,
        "evaluated": evaluated,
        "alone": float(mean.detach()),
        "norm_alone": float(norm),
    }


assert END < VOCABULARY
