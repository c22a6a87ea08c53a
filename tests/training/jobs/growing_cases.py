"""Code run inside the processes of test_growing.py."""

import math
from typing import Any

from tests.support.models.small_run import batch_of, engine_of, resolve
from training.attribution import attribute
from training.distributed import World
from training.telemetry import Telemetry

MODULE = "model.layers.1.mlp.down_proj"


def grown(world: World, *, factor: float, every: int) -> dict[str, Any]:
    """Steps in FP16 until the growing activation overflows: the telemetry events, that step, and its cause."""
    defect = f"{{kind: growing_activation, module: {MODULE}, factor: {factor}}}"
    overrides = ["precision.loss_scale.initial=16", "optimizer.learning_rate=1.0e-6"]
    resolved = resolve(world, stage=2, compute="fp16", micro=2, overrides=overrides)
    events = []
    with engine_of(world, resolved, defect=defect) as engine:
        telemetry = Telemetry(engine, probe=False)
        for step in range(1, 1000):
            batch = batch_of(world, 2, seed=step)
            due = step % every == 0
            if due:
                with telemetry.watching(batch):
                    outcome = engine.forward_backward(batch, step=step)
            else:
                outcome = engine.forward_backward(batch, step=step)
            health = engine.health(outcome)
            if not math.isfinite(health.loss):
                causes = attribute(engine, batch, outcome, step=step)
                return {"events": events, "overflow": step, "module": causes[0][1].module}
            if due:
                telemetry.measure()
            update = engine.step(health, 1e-6)
            if due:
                measured = telemetry.finish(applied=update.applied)
                events.append({"event": "telemetry", "step": step, "time": 1.0, "tokens": 0, **measured})
    raise AssertionError("nothing overflowed")
