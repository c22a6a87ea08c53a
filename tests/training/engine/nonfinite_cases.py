"""A gradient that is not finite, of each parameter on each rank in turn; run on real ranks by test_nonfinite.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from config.resolved import Resolved
from tests.support.models.small_run import batch_of, changed_json, engine_of, resolve, take
from tests.training.engine.expert_cases import model_of
from training.distributed import World
from training.engine import Engine
from training.engine.health import Outcome, RanksDisagree
from training.engine.tensors import local_gradient, shard_of, trainable_parameters

KINDS = ("norm", "embed_tokens", "q_proj", "experts.down_proj")
"""The first parameter of each kind is spoiled: replicas of `parallel.tensor`, slices of it, shared experts."""
VALUES = (float("nan"), float("inf"))


def spoiled(
    world: World, *, stage: int, compute: str, layout: str, folder: str, overrides: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The spoiled gradients that were taken for finite or changed a master, and whether a sound step is applied after.

    layout: tensor, sequence and expert share by two; hpz, offload; and data, of nothing shared.
    """
    world, alone, resolved = _laid_out(world, stage, compute, layout, Path(folder), overrides)
    wrong, micro = [], int(resolved.config.batch.micro_size or 1)
    with engine_of(world, resolved) as engine:
        take(engine, batch_of(alone, micro, seed=1), step=1, lr=0.01)
        before = [master.clone() for master in engine.masters()]
        for case, (name, plant) in enumerate(_plants(engine, reduced=layout != "offload")):
            for rank in range(world.world_size):
                value = VALUES[(case + rank) % 2]
                after = plant(value) if world.rank == rank else None
                outcome = engine.forward_backward(batch_of(alone, micro, seed=2), step=2)
                if after is not None:
                    after()
                took = _took(engine, outcome)
                held = zip(before, engine.masters(), strict=True)
                if took or not all(torch.equal(old, new) for old, new in held):
                    wrong.append(f"{value} in {name} on rank {rank}")
        sound = take(engine, batch_of(alone, micro, seed=3), step=3, lr=0.01)[1].applied
        finite = all(bool(master.isfinite().all()) for master in engine.masters())
    return {"wrong": wrong, "sound": sound and finite, "cases": case + 1}


def _took(engine: Engine, outcome: Outcome) -> bool:
    """Whether a spoiled step was taken for a finite one, or applied.

    Where each rank has whole gradients, one that is changed after the reduction makes them disagree: the run ends.
    """
    try:
        health = engine.health(outcome)
    except RanksDisagree as error:
        engine.gradients.discard()
        return not str(error).startswith("the gradient norm differs between ranks")
    return engine.step(health, 0.01).applied or health.finite


def _laid_out(
    world: World, stage: int, compute: str, layout: str, folder: Path, overrides: tuple[str, ...]
) -> tuple[World, World, Resolved]:
    """The ranks as they share, one of those that take samples of their own, and the run."""
    given, alone = ["telemetry.every_steps=0", "optimizer.eps=0.01", *overrides], world
    if layout == "tensor":
        world = world.sharing_tensors(2, timeout_minutes=2)
        given += ["parallel.tensor=2", "model.config.num_key_value_heads=2"]
        alone = World(world.zero_rank, world.zero_ranks, 0, world.device)
    elif layout == "sequence":
        world = world.sharing_sequences(2, timeout_minutes=2)
        given += ["parallel.sequence=2"]
    elif layout == "expert":
        world = world.sharing_experts(2, timeout_minutes=2)
        given += [model_of("mixtral"), "parallel.expert=2"]
    elif layout == "hpz":
        copies = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
        given.append(changed_json(folder, f"zero3_{compute}", **copies))
    variant = "_offload" if layout == "offload" else ""
    return world, alone, resolve(world, stage=stage, compute=compute, micro=2, variant=variant, overrides=given)


def _plants(engine: Engine, *, reduced: bool) -> list[tuple[str, Callable[[float], Callable[[], None]]]]:
    """Ways to spoil a gradient of this rank, before it is reduced and after: each gives what to do after the passes."""
    found: list[tuple[str, Callable[[float], Callable[[], None]]]] = []
    for kind in KINDS:
        chosen = next(((n, p) for n, p in trainable_parameters(engine).items() if kind in n), None)
        if chosen is not None:
            name, parameter = chosen
            found.append((f"the gradient of {name}", lambda value, p=parameter: _in_backward(p, value)))
            if reduced:
                found.append((f"the reduced {name}", lambda value, p=parameter: _in_reduced(engine, p, value)))
    return found


def _in_backward(parameter: torch.nn.Parameter, value: float) -> Callable[[], None]:
    def overwrite(gradient: torch.Tensor) -> torch.Tensor:
        changed = gradient.clone()
        changed.view(-1)[0] = value
        return changed

    return parameter.register_hook(overwrite).remove


def _in_reduced(engine: Engine, parameter: torch.nn.Parameter, value: float) -> Callable[[], None]:
    """Spoil this rank's part of the reduced gradient or, where it has no part, the gradient in the backward pass."""
    shard = shard_of(engine, parameter)
    if shard is None:
        return _in_backward(parameter, value)

    def overwrite() -> None:
        gradient = local_gradient(parameter, shard, engine.stage)
        assert gradient is not None
        gradient[0] = value

    return overwrite
