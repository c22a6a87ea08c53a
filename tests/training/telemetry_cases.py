"""What runs inside the processes of test_telemetry.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from config.errors import UserError
from modeling.linear_cross_entropy import label_loss_sum
from tests.support.small_run import batch_of, engine_of, masters_of, plain_model, resolve
from training.distributed import World
from training.telemetry import Telemetry


def measured(
    world: World, *, stage: int, compute: str, probe: bool, folder: str = "", manifest: dict | None = None
) -> dict[str, Any]:
    """One measured step, the masters with and without having measured, and plain torch's FP32 gradient norms."""
    overrides = ["precision.loss_scale.initial=256"]
    if manifest is not None:
        path = Path(folder) / f"telemetry-{world.rank}.json"
        path.write_text(json.dumps(manifest))
        overrides += ["precision.path=manifest", f"precision.manifest={path}"]
    results = []
    for wanted in (False, True):
        resolved = resolve(world, stage=stage, compute=compute, micro=2, overrides=overrides)
        with engine_of(world, resolved) as engine:
            batch = batch_of(world, 2, seed=1)
            weights, plain = masters_of(engine), None
            if wanted:
                try:
                    telemetry = Telemetry(engine, probe=probe)
                except UserError as error:
                    return {"refused": str(error)}
                with telemetry.watching(batch):
                    outcome = engine.forward_backward(batch, step=1)
                health = engine.health(outcome)
                plain = telemetry.finish()
            else:
                health = engine.health(engine.forward_backward(batch, step=1))
            update = engine.step(health, 0.001, measure=wanted)
            results.append((masters_of(engine), plain, update.update_ratio))
    before, after = weights, results[1][0]
    moved = sum(float((after[n] - before[n]).double().square().sum()) for n in before)
    size = sum(float(before[n].double().square().sum()) for n in before)
    return {
        "unchanged": all(torch.equal(results[0][0][name], after[name]) for name in after),
        "telemetry": results[1][1],
        "update_ratio": (results[1][2], (moved / size) ** 0.5),
        "reference": _reference_norms(world, resolved, before),
    }


def _reference_norms(world: World, resolved: Any, weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """FP32 gradient norms of the whole batch in plain torch, by module."""
    model = plain_model(resolved, weights)
    batch = batch_of(World(0, 1, 0, world.device), 8, seed=1)
    loss = label_loss_sum(model(input_ids=batch.input_ids[0]).logits, batch.labels[0]) / batch.label_tokens
    loss.backward()
    return {name.rpartition(".")[0]: float(p.grad.norm()) for name, p in model.named_parameters()}
