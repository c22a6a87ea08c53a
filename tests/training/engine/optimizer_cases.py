"""Steps of every optimizer on shared-out masters, beside its rule on whole parameters: run on real ranks."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from config.optimizers import OPTIMIZERS
from tests.support.models.small_run import GLOBAL, batch_of, engine_of, resolve
from tools.parity.slices import whole_state
from training.distributed import World
from training.engine import tensors
from training.engine.optimizer import IMPLEMENTATIONS
from training.engine.optimizers import muon
from training.engine.optimizers.rule import UpdateInputs

RATES = (0.004, 0.01, 0.01, 0.006)
SKIPPED = 3
EXPERTS = ("model.architecture=mixtral", "model.config.num_local_experts=3", "model.config.tie_word_embeddings=false")
"""Each layer has two tensors of three fused experts, which two ranks cut in the middle of one."""


def sharded_steps(
    world: World, *, name: str, stage: int, compute: str, variant: str = "", overrides: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Four steps, the third of them skipped: discarded, or not finite where `overrides` have a fault there.

    error: the largest distance of a master's change from its FP64 rule, in units of the largest change, beyond the
    rounding of the master. momentum: the relative error of the norm that scale events have.
    """
    settings = ["optimizer.weight_decay=0.1", "optimizer.gradient_clipping=0.05", f"optimizer.name={name}"]
    settings += ["optimizer.eps=1e-4"] if "eps" in OPTIMIZERS[name].settings else []
    micro = GLOBAL // (2 * world.world_size)
    settings += overrides
    resolved = resolve(world, stage=stage, compute=compute, micro=micro, variant=variant, overrides=settings)
    section, applied, clips, unchanged, error = resolved.config.optimizer, [], [], True, 0.0
    discarded = () if resolved.config.faults else (SKIPPED,)
    with engine_of(world, resolved) as engine:
        parameters = tensors.trainable_parameters(engine)
        updates = 0
        for step, rate in enumerate(RATES, start=1):
            health = engine.health(engine.forward_backward(batch_of(world, micro, seed=step), step=step))
            limit = section.gradient_clipping or math.inf
            clip = min(1.0, limit / health.grad_norm)
            before = {
                key: (
                    tensors.whole_master(engine, parameter),
                    tensors.whole_gradient(engine, parameter) * clip,
                    [whole_state(engine, parameter, state) for state in tensors.states_of(engine, parameter)],
                )
                for key, parameter in parameters.items()
            }
            sums = tensors.checksums_of(engine)
            update = engine.step(health, rate, apply=step not in discarded)
            applied.append(update.applied)
            clips.append(clip)
            if not update.applied:
                unchanged &= tensors.checksums_of(engine) == sums
                continue
            updates += 1
            for key, parameter in parameters.items():
                master, gradient, states = before[key]
                group = engine.group_of[id(parameter)]
                settings = {"lr": rate * group["lr_factor"], **{key: group[key] for key in ("weight_decay", "matrix")}}
                given = UpdateInputs(master, gradient, states, section=section, step=updates, **settings)
                expected = IMPLEMENTATIONS[name].update(given)
                apart = (tensors.whole_master(engine, parameter).double() - master.double() - expected).abs()
                apart -= torch.finfo(torch.float32).eps * master.abs()
                error = max(error, float(apart.max() / expected.abs().max().clamp(min=1e-30)))
        momentum = OPTIMIZERS[name].momentum
        assert momentum is not None
        squares = [
            whole_state(engine, parameter, momentum).double().square().sum() for parameter in parameters.values()
        ]
        norm = math.sqrt(sum(map(float, squares)))
        found = tensors.momentum_norm(engine)
    return {
        "applied": applied,
        "clip": clips,
        "skipped_unchanged": unchanged,
        "error": error,
        "momentum": abs((found or 0.0) - norm) / norm,
    }


@contextmanager
def exchanges() -> Iterator[list[list[int]]]:
    """Context in which each exchange between ranks adds how many values go to each rank."""
    sent, exchange = [], World.exchange

    def counted(self: World, values: torch.Tensor, out: list[int], back: list[int]) -> torch.Tensor:
        sent.append(out)
        return exchange(self, values, out, back)

    with patch.object(World, "exchange", counted):
        yield sent


def shared_work(world: World, *, stage: int, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Each rank's number of matrices computed in one step of Muon, and the number of values sent, by destination."""
    settings = ["optimizer.name=muon", *overrides]
    computed, step_of = [], muon.step_of

    def counted(matrix: torch.Tensor, **options: Any) -> torch.Tensor:
        computed.append(matrix.shape)
        return step_of(matrix, **options)

    with engine_of(world, resolve(world, stage=stage, compute="fp32", micro=2, overrides=settings)) as engine:
        shards = [
            (tensors.shape_of(parameter), tensors.shard_of(engine, parameter))
            for parameter in tensors.trainable_parameters(engine).values()
            if engine.group_of[id(parameter)]["matrix"]
        ]
        health = engine.health(engine.forward_backward(batch_of(world, 2, seed=1), step=1))
        with patch.object(muon, "step_of", counted), exchanges() as sent:
            engine.step(health, 0.01)
    return {
        "computed": computed,
        "matrices": [shape[-2:] for shape, _ in shards for _ in range(shape[0] if len(shape) == 3 else 1)],
        "own": sum(shard.length for _, shard in shards if shard is not None),
        "sent": [sum(values) for values in sent],
    }
