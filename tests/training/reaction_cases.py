"""Code run inside the processes of the tests of attribution, reactions and the manifest path."""

import weakref
from typing import Any
from unittest.mock import patch

import torch

from precision.findings import describe
from precision.observe import Observation, verify
from tests.support.models.small_run import batch_of, engine_of, manifest_of, masters_of, resolve, take
from training import attribution
from training.attribution import attribute
from training.distributed import World
from training.engine.health import RanksDisagree
from training.progress import Progress

HIT = "model.layers.1.mlp.down_proj"


def attributed(world: World, *, stage: int, compute: str, kind: str, rank: int, checkpointing: str) -> dict[str, Any]:
    """The attribution of a fault on one rank, and whether the run continues unchanged afterwards."""
    module = "" if kind == "nan_loss" else f", module: {HIT}"
    resolved = resolve(
        world,
        stage=stage,
        compute=compute,
        micro=2,
        overrides=[
            f"faults=[{{kind: {kind}, step: 2, rank: {rank}{module}}}]",
            "model.config.attention_dropout=0.1",
            "precision.loss_scale.initial=256",
            f"model.activation_checkpointing={'none' if checkpointing == 'none' else 'full'}",
            f"model.checkpointing_reentrant={'true' if checkpointing == 'reentrant' else 'false'}",
        ],
    )
    with engine_of(world, resolved) as engine:
        found, masters, losses = [], [], []
        torch.manual_seed(world.rank)
        for step in range(1, 4):
            batch = batch_of(world, 2, seed=step)
            outcome = engine.forward_backward(batch, step=step)
            health = engine.health(outcome)
            if not health.finite:
                found = attribute(engine, batch, outcome, step=step)
            engine.step(health, 0.001)
            losses.append(health.loss)
            masters.append(masters_of(engine))
        changed = any(not torch.equal(masters[1][name], masters[0][name]) for name in masters[0])
        return {
            "found": [(r, f.module, f.tensor, f.kind, f.count) for r, f in found],
            "changed": changed,
            "losses": losses,
            "scale": engine.loss_scale,
        }


def clean_losses(world: World, *, stage: int, compute: str) -> list[float]:
    """The losses of the same three steps without a fault, the second one refused."""
    overrides = ["model.config.attention_dropout=0.1", "precision.loss_scale.initial=256"]
    resolved = resolve(world, stage=stage, compute=compute, micro=2, overrides=overrides)
    with engine_of(world, resolved) as engine:
        losses = []
        torch.manual_seed(world.rank)
        for step in range(1, 4):
            health, _ = take(engine, batch_of(world, 2, seed=step), step=step, lr=0.001, apply=step != 2)
            losses.append(health.loss)
    return losses


def manifest_steps(world: World, *, stage: int, folder: str, manifest: dict, overrides: list[str]) -> dict[str, Any]:
    """Six steps under a manifest, the dtypes that were really computed in, and a change between two steps."""
    resolved = resolve(world, stage=stage, compute="fp32", overrides=[*manifest_of(folder, manifest), *overrides])
    rows = []
    with engine_of(world, resolved) as engine:
        for step in range(1, 7):
            health, update = take(engine, batch_of(world, 4, seed=step), step=step, lr=0.001)
            rows.append((health.loss, health.grad_norm, update.loss_scale, update.applied))
        with Observation(engine.model) as seen:
            engine.forward_backward(batch_of(world, 4, seed=9), step=9)
        verify(seen, engine.regions.dtypes, may_idle=engine.regions.may_idle)
        engine.discard_gradients()
        changed = next(iter(name for name in engine.regions.dtypes if name.endswith("down_proj")))
        engine.regions.set(changed, "fp32")
        with Observation(engine.model) as after:
            engine.forward_backward(batch_of(world, 4, seed=9), step=9)
        engine.discard_gradients()
        return {
            "rows": rows,
            "share": seen.flop_share(),
            "computed": (seen.computed[changed], after.computed[changed]),
            "masters": {str(value.dtype) for value in masters_of(engine).values()},
        }


def poisoned_parameter(world: World, *, stage: int, compute: str) -> list[tuple]:
    """The attribution of a weight that was NaN before the step, on every rank that holds it."""
    with engine_of(world, resolve(world, stage=stage, compute=compute, micro=2)) as engine:
        parameter = dict(engine.model.named_parameters())[f"{HIT}.weight"]
        held = getattr(parameter, "ds_tensor", parameter)
        if stage < 3 or world.rank == 1:
            held.data.view(-1)[0] = float("nan")
        batch = batch_of(world, 2, seed=1)
        outcome = engine.forward_backward(batch, step=1)
        health = engine.health(outcome)
        found = attribute(engine, batch, outcome, step=1)
        engine.step(health, 0.001)
        return [(r, f.module, f.tensor, f.kind, f.count) for r, f in found]


def whole_at_once(world: World, *, stage: int) -> int:
    """Most whole gradients that are alive together while the attribution describes them."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def counted(tensor: torch.Tensor) -> Any:
        nonlocal most
        alive.add(tensor)
        most = max(most, len(alive))
        return describe(tensor)

    spoiled = f"faults=[{{kind: nan_activation, step: 1, rank: 0, module: {HIT}}}]"
    with engine_of(world, resolve(world, stage=stage, compute="bf16", micro=2, overrides=[spoiled])) as engine:
        batch = batch_of(world, 2, seed=1)
        outcome = engine.forward_backward(batch, step=1)
        with patch.object(attribution, "describe", counted):
            attribute(engine, batch, outcome, step=1)
    return most


def stained_padding(world: World) -> list[tuple[int, str]]:
    """Who is blamed for a NaN on rank 0 where memory behind the last rank's partitions is NaN: it is not theirs."""
    odd = "hidden_size: 33, head_dim: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 1"
    spoiled = f"faults=[{{kind: nan_activation, step: 1, rank: 0, module: {HIT}}}]"
    overrides = [f"model.config={{{odd}, num_key_value_heads: 1}}", spoiled]
    with engine_of(world, resolve(world, stage=3, compute="bf16", micro=2, overrides=overrides)) as engine:
        norm: Any = engine.model.get_submodule("model.norm").weight
        if world.rank == 1:
            norm.ds_tensor.data[-1] = float("nan")  # of 33 values the first rank has 17
        batch = batch_of(world, 2, seed=1)
        outcome = engine.forward_backward(batch, step=1)
        found = attribute(engine, batch, outcome, step=1)
        return [(rank, finding.module) for rank, finding in found]


def disagreement(world: World, *, stage: int, what: str) -> str:
    """The error when rank 1 has another loss scale or step count."""
    resolved = resolve(world, stage=stage, compute="fp16", overrides=["precision.loss_scale.initial=256"])
    with engine_of(world, resolved) as engine:
        odd = world.rank == 1
        if what == "scale" and odd:
            engine.deepspeed.optimizer.loss_scaler.cur_scale = 128.0
        outcome = engine.forward_backward(batch_of(world, 4, seed=1), step=1)
        try:
            engine.health(outcome, Progress(applied=7 + (odd and what == "count")))
        except RanksDisagree as error:
            return str(error)
    return ""
