"""Functions that run inside the processes of test_export.py. Every function is called on every rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modeling.build import build_model, model_config, no_gather
from tests.support.models.small_run import SEQUENCE, VOCABULARY, batch_of, engine_of, resolve
from training.distributed import World
from training.engine import Engine
from training.engine.build import _gather_partitioned, engine_on, fp32_partitions
from training.engine.masters import local_masters
from training.engine.tensors import whole_master, whole_weight
from training.engine.weights import StaleMaster, compare_with_files, require_fresh_masters

FROZEN = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight")
ODD = ["model.config.hidden_size=28", "model.config.intermediate_size=47", "model.config.mlp_bias=true"]
"""Sizes that two ranks do not divide, so that partitions are padded and cut across parameters."""


def save(
    world: World,
    *,
    folder: str,
    stage: int,
    compute: str,
    variant: str = "",
    overrides: list[str] = [],  # noqa: B006  # sent to the processes, never changed
    frozen: bool = False,
) -> dict[str, Any]:
    """Two steps, a checkpoint in DeepSpeed's files, and what the engine had: masters and computing weights, whole."""
    resolved = resolve(world, stage=stage, compute=compute, variant=variant, overrides=overrides)
    with _engine(world, resolved, freeze=FROZEN if frozen else ()) as engine:
        for step in (1, 2):
            health = engine.health(engine.forward_backward(batch_of(world, 4, seed=step), step=step))
            engine.step(health, 0.001)
        engine.save(Path(folder), "deepspeed")
        parameters = dict(engine.model.named_parameters())
        weights = {name: whole_weight(engine, parameter).cpu() for name, parameter in parameters.items()}
        masters = {
            name: whole_master(engine, parameter).cpu() if parameter.requires_grad else weights[name]
            for name, parameter in parameters.items()
        }
        return {"masters": masters, "weights": weights, "groups": len(local_masters(engine.deepspeed.optimizer))}


@contextmanager
def _engine(world: World, resolved: Any, *, freeze: tuple[str, ...]) -> Iterator[Engine]:
    if not freeze:
        with engine_of(world, resolved) as engine:
            yield engine
        return
    shape = model_config(resolved.config.model, vocab_size=VOCABULARY, sequence_length=SEQUENCE)
    zero3 = fp32_partitions(resolved) if resolved.zero_stage == 3 else None
    gather = _gather_partitioned(world) if zero3 else no_gather
    model = build_model(resolved.config.model, shape, seed=0, gather=gather)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in freeze)
    engine = engine_on(model, resolved, world)
    try:
        yield engine
    finally:
        engine.close()


def _from_folder(world: World, folder: str, stage: int, compute: str, variant: str = "") -> Any:
    overrides = [f"model.name_or_path={folder}", "model.architecture=null", "model.config={}"]
    return resolve(world, stage=stage, compute=compute, variant=variant, overrides=overrides)


def start(world: World, *, folder: str, stage: int, compute: str, variant: str = "") -> dict[str, Any]:
    """A run from a folder: its masters, and its weights after a step at learning rate 0."""
    with engine_of(world, _from_folder(world, folder, stage, compute, variant)) as engine:
        parameters = dict(engine.model.named_parameters())
        after = {name: whole_master(engine, parameter).cpu() for name, parameter in parameters.items()}
        health = engine.health(engine.forward_backward(batch_of(world, 4, seed=1), step=1))
        applied = engine.step(health, 0.0).applied
        stepped = {name: whole_weight(engine, parameter).cpu() for name, parameter in parameters.items()}
        return {"after": after, "stepped": stepped, "applied": applied}


def stale(world: World, *, folder: str, stage: int, compute: str, how: str) -> str:
    """The error of a start whose masters, or whose weights, are not those of the folder on one rank.

    how: master changes one value of rank 1's partition; weight overwrites a module's weight after DeepSpeed has made
    the masters, as a load into the module does.
    """
    with engine_of(world, _from_folder(world, folder, stage, compute)) as engine:
        if how == "master" and world.rank == 1:
            local_masters(engine.deepspeed.optimizer)[0].data[5] += 0.5
        parameter = engine.model.get_parameter("model.layers.1.self_attn.o_proj.weight")
        if how != "master":
            getattr(parameter, "ds_tensor", parameter).data.mul_(1.5)
        found = []
        for check in (lambda: require_fresh_masters(engine), lambda: compare_with_files(engine, Path(folder))):
            try:
                check()
            except StaleMaster as error:
                found.append(str(error))
        return "\n".join(found)
