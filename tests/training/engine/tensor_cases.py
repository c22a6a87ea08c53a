"""Matrices that ranks share, through the engine; run on real ranks by test_tensor_parallel.py.

The oracle is plain torch on one rank: whole matrices, the whole global batch, torch's own AdamW and clipping.
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from lab.matrix.run import fp32_model
from precision.manifest import load_manifest
from precision.observe import Observation, verify
from precision.regions import Regions
from tests.support.models import plain_steps
from tests.support.models.plain_steps import EVALUATED, SPOILED, distance_of_updates, farthest, numbers_and_moves
from tests.support.models.small_models import distance
from tests.support.models.small_run import (
    VOCABULARY,
    batch_of,
    engine_of,
    faults_of,
    masters_of,
    plain_model,
    refusal,
    resolve,
)
from training.distributed import World
from training.engine import Engine
from training.engine.flips import bit_sum
from training.engine.health import RanksDisagree
from training.engine.tensor_slices import replicas
from training.progress import START
from training.session import seed_everything

STEPS = 3
LR = 0.01
MODEL = (
    "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, tie_word_embeddings: %s}"
)
OVERRIDES = ("parallel.tensor=2", "optimizer.eps=0.01", "telemetry.every_steps=0")


MEASURED = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "granite": {},
    "cohere": {},
    "cohere2": {"sliding_window": 8},
    "smollm3": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "phi": {},
    "stablelm": {},
    "nemotron": {},
}
"""Kind of model to what its config needs beside SIZES."""
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8}


def against_one_rank(
    world: World,
    *,
    stage: int,
    compute: str = "fp32",
    tied: bool = False,
    kind: str | None = None,
    manifest: str | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Errors of losses, norms, the evaluation and the masters after three steps. kind: of MEASURED.

    manifest: a file; plain torch is under it, too, and modules were seen to compute in its dtypes.
    """
    alone = World(world.rank // 2, world.world_size // 2, 0, world.device)
    world = world.sharing(tensor=2, timeout_minutes=2)
    micro = 8 // alone.world_size // 2
    given = [*OVERRIDES, of_kind(kind) if kind else MODEL % str(tied).lower(), *overrides]
    if manifest is not None:
        given += ["precision.path=manifest", "precision.compute=auto", f"precision.manifest={manifest}"]
        given += ["precision.loss_scale.initial=256"]
    resolved = resolve(world, stage=stage, compute=compute, micro=micro, overrides=given)
    found = []
    with engine_of(world, resolved) as engine:
        start = masters_of(engine)
        for step in range(1, STEPS + 1):
            watch = Observation(engine.model) if step == 1 and engine.regions is not None else None
            with watch or nullcontext():
                outcome = engine.forward_backward(batch_of(alone, micro, seed=step), step=step)
            if watch is not None and engine.regions is not None:
                verify(watch, engine.regions.dtypes, may_idle=engine.regions.may_idle)
            health = engine.health(outcome)
            found += [health.loss, health.grad_norm]
            assert engine.step(health, LR / step).applied
        found.append(engine.evaluate([batch_of(alone, micro, seed=EVALUATED)]).loss)
        masters = masters_of(engine)
        regions = {} if engine.regions is None else engine.regions.dtypes
    drawn = fp32_model(resolved.config.model, seed=resolved.config.run.seed)
    plain = plain_model(resolved, start, attention="eager" if kind == "gemma2" else "sdpa")
    under = Regions(plain, load_manifest(Path(manifest))).dtypes if manifest is not None else {}
    expected = plain_steps.plain_steps(plain, resolved.config.optimizer, steps=STEPS, lr=LR)
    weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    return {
        "start": max(float((start[name] - value).abs().max()) for name, value in drawn.named_parameters()),
        "numbers": farthest(found, expected),
        "masters": distance_of_updates(masters, weights, start),
        "norm": expected[1],
        "regions": regions,
        "regions of one rank": under,
    }


def refused(world: World, *, manifest: str) -> str:
    """Why no engine is built under a manifest."""
    world = world.sharing(tensor=2, timeout_minutes=2)
    given = [*OVERRIDES, "precision.path=manifest", "precision.compute=auto", f"precision.manifest={manifest}"]
    return refusal(world, resolve(world, stage=2, compute="fp32", overrides=given))


def of_kind(kind: str) -> str:
    """The override that makes a small model of a kind of MEASURED."""
    known = AutoConfig.for_model(kind)
    names = {*known.to_dict(), *known.attribute_map}
    sizes = {key: value for key, value in SIZES.items() if key in names} | MEASURED[kind]
    return f"model={{architecture: {kind}, config: {json.dumps(sizes)}}}"


def with_dropout(world: World, *, stage: int, by_rank: bool) -> dict[str, str]:
    """Steps of a model that drops out what it has whole. by_rank: each rank draws for itself, which is wrong.

    The disagreement, if any; and the sums of the replicas' bits of this rank.
    """
    world, found = world.sharing(tensor=2, timeout_minutes=2), ""
    given = [*OVERRIDES, of_kind("opt"), "model.config.dropout=0.1"]
    with engine_of(world, resolve(world, stage=stage, compute="fp32", micro=8, overrides=given)) as engine:
        seed_everything(1 + (world.rank if by_rank else world.zero_rank))
        try:
            _steps(engine, 3)
        except RanksDisagree as error:
            found = str(error)
        bits = {name: str(bit_sum(parameter.detach().view(-1))) for name, parameter in replicas(engine.model)}
    return {"found": found, **bits}


def blamed(world: World, *, stage: int, compute: str) -> list[list[tuple[int, str]]]:
    """Ranks and modules that are blamed for each of the steps of SPOILED."""
    world, alone = world.sharing(tensor=2, timeout_minutes=2), World(0, 1, 0, world.device)
    given = [*OVERRIDES, faults_of(SPOILED)]
    with engine_of(world, resolve(world, stage=stage, compute=compute, micro=8, overrides=given)) as engine:
        return plain_steps.blamed(engine, partial(batch_of, alone, 8))


def with_a_changed_replica(world: World, *, stage: int) -> str:
    """The check's finding for a value that is changed on rank 1, of a token that is in no batch."""
    world = world.sharing(tensor=2, timeout_minutes=2)
    with engine_of(world, resolve(world, stage=stage, compute="fp32", micro=8, overrides=OVERRIDES)) as engine:
        _steps(engine, 1)
        if world.rank == 1:
            weight = engine.model.get_input_embeddings().weight
            getattr(weight, "ds_tensor", weight).data.view(-1)[-1] += 0.5
        try:
            _steps(engine, 16, tokens=VOCABULARY - 1)
        except RanksDisagree as error:
            return str(error)
    return ""


def _steps(engine: Engine, count: int, *, tokens: int = VOCABULARY) -> None:
    """Steps on the same sequences on each rank, of the first `tokens` of the vocabulary."""
    progress = START
    for step in range(1, count + 1):
        batch = batch_of(World(0, 1, 0, engine.world.device), 8, seed=step)
        batch.input_ids.clamp_(max=tokens - 1)
        health = engine.health(engine.forward_backward(batch, step=step), progress)
        progress = progress.after(tokens=0, applied=engine.step(health, LR).applied)


def against_data_ranks(world: World, *, overrides: Sequence[str]) -> dict[str, float]:
    """Errors of losses, norms and masters against two ranks that share nothing, from the same weights."""
    runs = []
    for ranks in (2, 1):  # what follows an engine with shared matrices is as if there had been none
        there = world.sharing(tensor=ranks, timeout_minutes=2)
        given = ["telemetry.every_steps=0", *overrides, f"parallel.tensor={ranks}"]
        batch = partial(batch_of, World(there.zero_rank, there.zero_ranks, 0, world.device), 4)
        with engine_of(there, resolve(there, stage=2, compute="fp32", overrides=given)) as engine:
            runs.append(numbers_and_moves(engine, batch, steps=STEPS, lr=LR))
    (two, found), (one, expected) = runs
    return {"numbers": farthest(two, one), "masters": distance(found, expected)}
