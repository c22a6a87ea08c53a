"""Functions that run inside the processes of test_bisect.py. Every function is called on every rank."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.models.small_run import batch_of, engine_of, masters_of, resolve
from tests.tools.parity.step_cases import step_parity
from training.distributed import World
from training.engine.rng import generators
from training.schedule import scheduled_rate


def step_with_dropout(
    world: World, *, stage: int, compute: str, overrides: Sequence[str], measured: bool
) -> dict[str, Any]:
    """{"row", "state"}: a step of a GPT-2 as a run takes it, or as it is measured, and what it leaves behind.

    Measured, its passes without dropout draw numbers, too, and in FP16 overflow.
    """
    resolved = resolve(world, stage=stage, compute=compute, micro=2, overrides=overrides)
    batch = batch_of(world, 2, seed=1)
    with engine_of(world, resolved) as engine:
        model, parity = engine.model, step_parity(engine, resolved, world)
        torch.manual_seed(7 + world.rank)
        if measured:
            _disturb_without_dropout(model, overflow=compute == "fp16")
            row = parity.step(batch, applied=0, dropped=True)
        else:
            model.train()
            health = engine.health(engine.forward_backward(batch, step=1))
            update = engine.step(health, scheduled_rate(resolved.config, 0))
            row = {"loss_with_dropout": health.loss, "grad_norm": health.grad_norm, "applied": update.applied}
        drawn = generators(world.device)["cpu"].tolist()
        masters = {name: master.tolist() for name, master in masters_of(engine).items()}
        return {"row": row, "state": {"masters": masters, "generators": drawn, "scaler": engine.scaler_state()}}


def _disturb_without_dropout(model: torch.nn.Module, *, overflow: bool) -> None:
    def draw(*_: Any) -> None:
        if not model.training:
            torch.rand(1)

    model.register_forward_pre_hook(draw)
    if overflow:
        bias = model.get_parameter("transformer.ln_f.bias")
        bias.register_hook(lambda gradient: None if model.training else gradient * float("inf"))
