"""Steps of every optimizer on shared-out masters, beside its rule on whole parameters: run on real ranks."""

from __future__ import annotations

from typing import Any

import torch

from config.optimizers import OPTIMIZERS
from tests.support.small_run import batch_of, engine_of, resolve
from training.distributed import World
from training.engine.optimizer import implementation
from training.engine.tensors import checksums_of, trainable_parameters, whole_gradient, whole_master, whole_state

RATES = (0.004, 0.01, 0.01, 0.006)
SKIPPED = 3


def sharded_steps(world: World, *, name: str, stage: int, compute: str, variant: str = "") -> dict[str, Any]:
    """Four steps, the third of them skipped.

    error: the largest distance of a master's change from its FP64 rule, in units of the largest change, beyond the
    rounding of the master.
    """
    settings = ["optimizer.weight_decay=0.1", "optimizer.gradient_clipping=0.05", f"optimizer.name={name}"]
    settings += ["optimizer.eps=1e-4"] if "eps" in OPTIMIZERS[name].settings else []
    resolved = resolve(world, stage=stage, compute=compute, micro=2, variant=variant, overrides=settings)
    section, applied, clips, unchanged, error = resolved.config.optimizer, [], [], True, 0.0
    with engine_of(world, resolved) as engine:
        parameters = trainable_parameters(engine)
        decays = {
            id(parameter): group["weight_decay"] for group in _groups(engine, section) for parameter in group["params"]
        }
        updates = 0
        for step, rate in enumerate(RATES, start=1):
            health = engine.health(engine.forward_backward(batch_of(world, 2, seed=step), step=step))
            clip = min(1.0, section.gradient_clipping / health.grad_norm)
            before = {
                key: (
                    whole_master(engine, parameter),
                    whole_gradient(engine, parameter) * clip,
                    [whole_state(engine, parameter, state) for state in OPTIMIZERS[name].states],
                )
                for key, parameter in parameters.items()
            }
            sums = checksums_of(engine)
            update = engine.step(health, rate, apply=step != SKIPPED)
            applied.append(update.applied)
            clips.append(clip)
            if not update.applied:
                unchanged &= checksums_of(engine) == sums
                continue
            updates += 1
            for key, parameter in parameters.items():
                master, gradient, states = before[key]
                expected = implementation(name).update(
                    master,
                    gradient,
                    states,
                    section=section,
                    weight_decay=decays[id(parameter)],
                    lr=rate,
                    step=updates,
                )
                apart = (whole_master(engine, parameter).double() - master.double() - expected).abs()
                apart -= torch.finfo(torch.float32).eps * master.abs()
                error = max(error, float(apart.max() / expected.abs().max().clamp(min=1e-30)))
    return {"applied": applied, "clip": clips, "skipped_unchanged": unchanged, "error": error}


def _groups(engine: Any, section: Any) -> list[dict[str, Any]]:
    from modeling.parameter_groups import parameter_groups

    return parameter_groups(engine.model, weight_decay=section.weight_decay)
