"""Sequences that ranks share, through the engine; run on real ranks by test_sequence_parallel.py.

The oracle is plain torch on one rank: whole sequences, the whole global batch, torch's own AdamW and clipping.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from data.batches.loader import IGNORED_LABEL, Batch
from data.batches.sequence_slices import slice_of
from data.corpora.documents import document_positions
from modeling.build import model_config
from modeling.linear_cross_entropy import label_loss_sum
from tests.support.models import plain_steps
from tests.support.models.plain_steps import (
    EVALUATED,
    SPOILED,
    distance_of_updates,
    farthest,
    numbers_and_moves,
    trained,
)
from tests.support.models.small_models import distance
from tests.support.models.small_run import GLOBAL, VOCABULARY, engine_of, faults_of, masters_of, plain_model, resolve
from tools.export_hf.outputs import output_errors
from tools.parity.reference import Reference
from training.distributed import World
from training.telemetry import Telemetry

LENGTH = 13
"""[tokens] Which two ranks do not divide."""
END = 1
STEPS = 3
LR = 0.01
MODEL = ("model.architecture=mistral", "model.config.num_attention_heads=4", "model.config.sliding_window=6")
OVERRIDES = (f"data.sequence_length={LENGTH}", "parallel.sequence=2", "optimizer.eps=0.01")


def whole_batch(seed: int, *, apart: bool, length: int = LENGTH) -> Batch:
    """A global batch of unevenly masked labels, one micro-batch; in documents of up to 5 tokens where apart."""
    tokens = torch.randint(VOCABULARY, (GLOBAL, length + 1), generator=torch.Generator().manual_seed(seed))
    if apart:
        tokens[:, 4::5] = END
    ids, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    for row in range(GLOBAL):
        labels[row, : row * length // GLOBAL] = IGNORED_LABEL
    positions = None
    if apart:
        labels[ids == END] = IGNORED_LABEL
        positions = torch.from_numpy(document_positions(ids.numpy(), END))[None]
    counted = int((labels != IGNORED_LABEL).sum())
    return Batch(0, ids[None], labels[None], np.arange(GLOBAL), counted, position_ids=positions)


def mine_of(world: World, batch: Batch, *, micro: int) -> Batch:
    """This rank's slices of its sequences of a global batch, in micro-batches."""
    rank, ranks = (world.sequence.rank, world.sequence.size) if world.sequence else (0, 1)
    groups = world.world_size // ranks
    first = world.rank // ranks * GLOBAL // groups
    rows = slice(first, first + GLOBAL // groups)

    def cut(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[0, rows].reshape(-1, micro, values.shape[-1])

    parts = {"input_ids": cut(batch.input_ids), "labels": cut(batch.labels), "position_ids": cut(batch.position_ids)}
    given: dict[str, Any] = parts
    return slice_of(dataclasses.replace(batch, **given), rank=rank, ranks=ranks)


def part_of(world: World, micro: int, *, seed: int, apart: bool = False, length: int = LENGTH) -> Batch:
    """This rank's slices of its sequences of the global batch of a seed."""
    return mine_of(world, whole_batch(seed, apart=apart, length=length), micro=micro)


def against_one_rank(
    world: World,
    *,
    stage: int,
    compute: str = "fp32",
    apart: bool = False,
    heads: int = 2,
    ranks: int = 2,
    overrides: Sequence[str] = (),
) -> dict[str, float]:
    """Errors of losses, norms, the evaluation and the masters after three steps; heads: of keys and values."""
    world, micro = world.sharing(sequence=ranks, timeout_minutes=2), GLOBAL // 4
    given = [*MODEL, f"model.config.num_key_value_heads={heads}", *OVERRIDES, f"parallel.sequence={ranks}"]
    given += [f"data.document_masking={str(apart).lower()}", *overrides]
    resolved = resolve(world, stage=stage, compute=compute, micro=micro, overrides=given)
    known = set(ALL_ATTENTION_FUNCTIONS)
    batch = partial(part_of, world, micro, apart=apart)
    with engine_of(world, resolved) as engine:
        start = masters_of(engine)
        plain = plain_model(resolved, start)
        found = trained(engine, batch, steps=STEPS, lr=LR)
        found.append(engine.evaluate([batch(seed=EVALUATED)]).loss)
        masters = masters_of(engine)
    assert set(ALL_ATTENTION_FUNCTIONS) == known, "a closed engine leaves nothing"

    def loss_of(model: torch.nn.Module, seed: int) -> torch.Tensor:
        return mean_loss(model, whole_batch(seed, apart=apart))

    expected = plain_steps.plain_steps(plain, resolved.config.optimizer, steps=STEPS, lr=LR, loss_of=loss_of)
    weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    return {
        "numbers": farthest(found, expected),
        "masters": distance_of_updates(masters, weights, start),
        "norm": expected[1],
    }


def blamed(world: World) -> list[list[tuple[int, str]]]:
    """Ranks and modules that are blamed for each of the steps of SPOILED."""
    world = world.sharing(sequence=2, timeout_minutes=2)
    given = [*MODEL, *OVERRIDES, faults_of(SPOILED)]
    with engine_of(world, resolve(world, stage=2, compute="fp32", micro=GLOBAL // 2, overrides=given)) as engine:
        return plain_steps.blamed(engine, partial(part_of, world, GLOBAL // 2))


def references(world: World, *, stage: int) -> dict[str, float]:
    """Errors of the parity gate's FP32 reference against plain torch, and the telemetry probe's smallest cosine."""
    world = world.sharing(sequence=2, timeout_minutes=2)
    probe = ["telemetry.probe=true"] if stage < 3 else []
    given = [*MODEL, *OVERRIDES, "data.document_masking=true", *probe]
    resolved = resolve(world, stage=stage, compute="fp32", micro=GLOBAL // 4, overrides=given)
    whole = whole_batch(1, apart=True)
    batch, cosine = mine_of(world, whole, micro=GLOBAL // 4), 1.0
    with engine_of(world, resolved) as engine:
        masters = masters_of(engine)
        shape = model_config(resolved.config.model, vocab_size=VOCABULARY, sequence_length=LENGTH)
        reference, plain = Reference(resolved, shape, world), plain_model(resolved, masters)
        reference.load(masters.items())
        made: list[Any] = []
        own = output_errors(
            reference.model,
            engine.model,
            lambda: made.append(reference.loss_and_gradients(batch)),
            lambda: engine.forward_backward(batch, step=1),
        )
        [(loss, gradients)] = made
        engine.discard_gradients()
        if probe:
            telemetry = Telemetry(engine, probe=True)
            with telemetry.watching(batch):
                health = engine.health(engine.forward_backward(batch, step=1))
            telemetry.measure()
            applied = engine.step(health, LR).applied
            agreement = telemetry.finish(applied=applied)["probe"]
            cosine = min(item["cosine"] for item in agreement.values())
    expected = mean_loss(plain, whole)
    expected.backward()
    exact = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    off = distance(gradients, exact)
    assert "model.layers.1.self_attn" in own
    return {
        "loss": abs(loss / float(expected.detach()) - 1),
        "gradients": off,
        "outputs": max(error for error, _ in own.values()),
        "probe": cosine,
    }


def saved_model(world: World, *, folder: str) -> None:
    """Save a model of MODEL with weights from the seed."""
    with engine_of(world, resolve(world, stage=2, compute="fp32", overrides=[*MODEL, OVERRIDES[0]])) as engine:
        if world.rank == 0:
            engine.model.save_pretrained(folder)
    world.wait_for_all()


def against_no_sharing(world: World, *, overrides: Sequence[str], length: int = LENGTH) -> dict[str, float]:
    """Errors of losses, norms, metrics and masters on shared sequences against ranks that share none."""
    runs = []
    for ranks in (1, 2):
        there = world.sharing(sequence=ranks, timeout_minutes=2)
        more = [*OVERRIDES, *overrides, f"data.sequence_length={length}", f"parallel.sequence={ranks}"]
        batch = partial(part_of, there, GLOBAL // 4, length=length)
        with engine_of(there, resolve(there, stage=2, compute="fp32", micro=GLOBAL // 4, overrides=more)) as engine:
            runs.append(numbers_and_moves(engine, batch, steps=STEPS, lr=LR))
    (one, expected), (two, found) = runs
    return {"numbers": farthest(two, one), "masters": distance(found, expected), "count": len(one) // STEPS}


def mean_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """() of whole sequences, by plain torch."""
    inputs = {"input_ids": batch.input_ids[0]}
    if batch.position_ids is not None:
        inputs["position_ids"] = batch.position_ids[0]
    return label_loss_sum(model(**inputs, use_cache=False).logits, batch.labels[0]) / batch.label_tokens
