"""Code run inside the processes of test_reshard.py, and of tests of exports. Each function is called on every rank."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from config.errors import UserError
from config.optimizers import COUNT
from modeling.build import build_model, model_config, no_gather
from tests.support.models.small_run import SEQUENCE, VOCABULARY, batch_of, resolve, take
from tools.parity.slices import whole_state
from training.checkpoint.reader import PLAIN
from training.checkpoint.reshard import load_resharded, restore
from training.distributed import World
from training.engine import Engine
from training.engine.build import _gather_partitioned, engine_on, fp32_partitions
from training.engine.masters import local_masters
from training.engine.tensors import Checksums, checksums_of, whole_master, whole_weight
from training.engine.weights import require_fresh_masters

FROZEN = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight")
ODD = ("model.config.hidden_size=28", "model.config.intermediate_size=47", "model.config.mlp_bias=true")
"""Sizes that two ranks do not divide: parameters are cut anywhere, partitions are padded."""
UNTIED = ("model.config.tie_word_embeddings=false",)
SAVED_AFTER = 3
STEPS = 6

Layout = dict[str, Any]
"""Arguments of `engine`, but the world and the seed."""


@contextmanager
def engine(
    world: World,
    *,
    stage: int,
    compute: str,
    seed: int,
    micro: int = 4,
    variant: str = "",
    overrides: tuple[str, ...] = (),
    frozen: tuple[str, ...] = (),
) -> Iterator[Engine]:
    """A small engine whose weights, and one persistent buffer, are drawn from `seed`."""
    resolved = resolve(world, stage=stage, compute=compute, micro=micro, variant=variant, overrides=overrides)
    shape = model_config(resolved.config.model, vocab_size=VOCABULARY, sequence_length=SEQUENCE)
    zero3 = fp32_partitions(resolved) if resolved.zero_stage == 3 else None
    gather = partial(_gather_partitioned, world) if zero3 else no_gather
    model = build_model(resolved.config.model, shape, seed=seed, gather=gather)
    model.register_buffer("seen", torch.full((3,), float(seed)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    built = engine_on(model, resolved, world)
    try:
        yield built
    finally:
        built.close()


def trained_and_saved(
    world: World, *, folder: str, layout: Layout, first: int = SAVED_AFTER, corrupt: str = ""
) -> dict[str, Any]:
    """The first steps, a save, its state then, and the losses of the run that was not stopped.

    corrupt: master or exp_avg_sq changes one value of the last rank's part of it before the files are written.
    """
    with engine(world, seed=0, **layout) as running:
        _train(running, world, range(1, first + 1), micro=layout.get("micro", 4))
        held = _held(running)
        if corrupt and world.rank == world.world_size - 1:
            flat = local_masters(running.deepspeed.optimizer)[0]
            corrupted = flat if corrupt == "master" else running.deepspeed.basic_optimizer.state[flat][corrupt]
            corrupted.data[7] += 1e-6
        running.save(Path(folder), "deepspeed")
        losses = _train(running, world, range(first + 1, STEPS + 1), micro=layout.get("micro", 4))
        return {**held, "losses": losses}


def resumed_with_groups(world: World, *, folder: str, stage: int, recorded: Checksums) -> tuple[str | None, Any]:
    """The error for a checkpoint of the same layout whose optimizer had no groups, and the state then held."""
    own = ('optimizer.groups=[{match: "*.down_proj.weight", weight_decay: 0.0}]',)
    with engine(world, stage=stage, compute="fp32", seed=1, overrides=own) as running:
        try:
            return restore(running, Path(folder), recorded=recorded, change=None, opener=PLAIN), _held(running)
        except UserError as error:
            return str(error), None


def resumed(
    world: World,
    *,
    folder: str,
    layout: Layout,
    recorded: Checksums | None,
    first: int = SAVED_AFTER,
    trained_before: bool = False,
) -> dict[str, Any]:
    """The state that an engine of another layout and other weights holds after the load, and the steps that follow.

    trained_before: it has trained a step before the load, as at a rollback.
    """
    with engine(world, seed=7, **layout) as running:
        if trained_before:
            _train(running, world, [1], micro=layout.get("micro", 4))
        before = torch.get_rng_state()
        restored = load_resharded(running, Path(folder) / "deepspeed", recorded=recorded)
        assert torch.equal(before, torch.get_rng_state())
        require_fresh_masters(running)
        held = _held(running)
        losses = _train(running, world, range(first + 1, STEPS + 1), micro=layout.get("micro", 4))
        return {**held, "restored": restored, "losses": losses}


def refused(
    world: World, *, folder: str, layout: Layout, recorded: Checksums | None, states: tuple[str, ...] | None = None
) -> str:
    """The error of a load. states: what this run's optimizer keeps, where it is another one."""
    with engine(world, seed=7, **layout) as running:
        if states is not None:
            running.optimizer_spec = replace(running.optimizer_spec, states=states)
        try:
            load_resharded(running, Path(folder) / "deepspeed", recorded=recorded)
        except UserError as error:
            return str(error)
    return ""


def _train(running: Engine, world: World, steps: Iterable[int], *, micro: int) -> list[tuple[float, float]]:
    rows = []
    for step in steps:
        health, update = take(running, batch_of(world, micro, seed=step), step=step, lr=0.001)
        assert update.applied
        rows.append((health.loss, health.grad_norm))
    return rows


def _held(running: Engine) -> dict[str, Any]:
    parameters = dict(running.model.named_parameters())
    weights = {name: whole_weight(running, parameter).cpu() for name, parameter in parameters.items()}
    kept = running.deepspeed.basic_optimizer.state.values()
    trains = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    return {
        "weights": weights,
        "masters": {name: whole_master(running, parameter).cpu() for name, parameter in trains.items()},
        **{
            key: {name: whole_state(running, parameter, key).cpu() for name, parameter in trains.items()}
            for key in running.optimizer_spec.states
            if running.deepspeed.basic_optimizer.state
        },
        "optimizer": running.optimizer_spec,
        "updates": {float(state[COUNT]) for state in kept if COUNT in state},
        "checksums": checksums_of(running),
        "buffer": running.model.get_buffer("seen").float(),
        "settings": [
            (group["weight_decay"], *(group[key] for key in running.optimizer_spec.settings))
            for group in running.deepspeed.optimizer.param_groups
        ],
        "groups": len(local_masters(running.deepspeed.optimizer)),
        "states": len(running.deepspeed.basic_optimizer.state),
    }
