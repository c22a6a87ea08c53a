"""Code run inside the processes of test_telemetry.py."""

import math
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch

from config.errors import UserError
from precision.dtypes import DTYPES
from tests.support.models.gradient_oracle import gradient_statistics
from tests.support.models.plain_steps import mean_label_loss
from tests.support.models.small_run import batch_of, engine_of, manifest_of, masters_of, plain_model, resolve
from training.distributed import World
from training.engine.tensors import local_weight, shard_of, whole_gradient
from training.telemetry import Telemetry


def measured(
    world: World, *, stage: int, compute: str, probe: bool, folder: str = "", manifest: dict | None = None
) -> dict[str, Any]:
    """One measured step, the masters with and without having measured, and plain torch's FP32 gradient norms."""
    overrides = ["precision.loss_scale.initial=256"]
    if manifest is not None:
        overrides += manifest_of(folder, manifest)
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
                oracle = _oracle(engine)
                telemetry.measure()
                engine.step(health, 0.001)
                plain = telemetry.finish(applied=True)
            else:
                engine.step(engine.health(engine.forward_backward(batch, step=1)), 0.001)
            results.append((masters_of(engine), plain))
    before, after = weights, results[1][0]
    moves = {}
    for name in before:
        module, move = name.rpartition(".")[0], (after[name] - before[name]).double().square().sum()
        known = moves.setdefault(module, [0.0, 0.0])
        moves[module] = [known[0] + float(move), known[1] + float(before[name].double().square().sum())]
    moved = sum(float((after[n] - before[n]).double().square().sum()) for n in before)
    size = sum(float(before[n].double().square().sum()) for n in before)
    return {
        "unchanged": all(torch.equal(results[0][0][name], after[name]) for name in after),
        "telemetry": results[1][1],
        "update_ratio": (moved / size) ** 0.5,
        "update_ratios": {module: (move / own) ** 0.5 for module, (move, own) in moves.items()},
        "oracle": oracle,
        "reference": _reference_norms(resolved, before),
    }


def maxima(world: World) -> tuple[list[float], list[float]]:
    """The largest of two ranks' values of every kind, all pairs of them, and what they are by torch."""
    kinds = [0.0, -0.0, 5e-324, -5e-324, 1.5, -1.5, 1e308, -1e308, math.inf, -math.inf, math.nan, -math.nan]
    pairs = torch.cartesian_prod(*[torch.tensor(kinds, dtype=torch.float64)] * 2)
    mine = pairs[:, world.rank].contiguous()
    return world.maximum(mine).tolist(), world.gather(mine).amax(0).tolist()


def sent(world: World, **arguments: Any) -> dict[str, int]:
    """Bytes that the collectives of `Telemetry.finish` return on a rank, by their kind."""
    counted: dict[str, int] = {}

    def counting(kind: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(result: torch.Tensor, *rest: Any, **options: Any) -> Any:
            counted[kind] = counted.get(kind, 0) + result.nbytes
            return collective(result, *rest, **options)

        return run

    kinds = ("all_reduce", "all_gather_into_tensor", "all_gather", "all_to_all_single", "broadcast", "reduce")
    plain, finish = {kind: getattr(torch.distributed, kind) for kind in kinds}, Telemetry.finish

    def counted_finish(self: Telemetry, **options: Any) -> dict[str, Any]:
        for kind, collective in plain.items():
            setattr(torch.distributed, kind, counting(kind, collective))
        try:
            return finish(self, **options)
        finally:
            for kind, collective in plain.items():
                setattr(torch.distributed, kind, collective)

    Telemetry.finish = counted_finish  # type: ignore[method-assign]
    try:
        parameters = len(measured(world, **arguments)["telemetry"]["gradients"])
    finally:
        Telemetry.finish = finish  # type: ignore[method-assign]
    return {**counted, "modules": parameters}


def _oracle(engine: Any) -> dict[str, dict[str, float]]:
    """The expected figures by module, from whole gradients value by value."""
    found: dict[str, dict[str, float]] = {}
    for module, group in groupby(engine.model.named_parameters(), key=lambda item: item[0].rpartition(".")[0]):
        whole = [(name, whole_gradient(engine, parameter)) for name, parameter in group]
        computes = engine.compute if engine.regions is None else engine.regions.dtypes.get(module, "fp32")
        if computes == "fp8":
            computes = engine.regions.manifest.default
        found |= gradient_statistics(whole, DTYPES[computes], scale=engine.loss_scale)
    return found


def apart(world: World, *, stage: int) -> dict[str, Any]:
    """The drift of a step at which one weight, on the rank that has its master, is not its master rounded."""
    resolved = resolve(world, stage=stage, compute="bf16", micro=2)
    with engine_of(world, resolved) as engine:
        batch = batch_of(world, 2, seed=1)
        telemetry = Telemetry(engine, probe=False)
        with telemetry.watching(batch):
            health = engine.health(engine.forward_backward(batch, step=1))
        parameter = dict(engine.model.named_parameters())["model.layers.1.mlp.down_proj.weight"]
        shard = shard_of(engine, parameter)
        if shard is not None and shard.start == 0:
            values = local_weight(parameter, shard, stage)
            place = int(values.abs().argmax())
            values[place] *= 1.5
        telemetry.measure()
        engine.step(health, 0.001)
        return telemetry.finish(applied=True)["drift"]


def _reference_norms(resolved: Any, weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """FP32 gradient norms of the whole batch in plain torch, by module."""
    model = plain_model(resolved, weights)
    mean_label_loss(model, 1).backward()
    return {name.rpartition(".")[0]: float(p.grad.norm()) for name, p in model.named_parameters()}
