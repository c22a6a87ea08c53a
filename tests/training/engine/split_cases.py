"""Code run inside the processes of test_split_masters.py. Every function is called on every rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.utils import safe_get_full_fp32_param

from config.errors import UserError
from tests.support.models.small_run import batch_of, engine_of, masters_of, resolve, take
from training.distributed import World
from training.engine.ledger import read_ledger
from training.engine.tensors import checksums_of, shard_of, trainable_parameters

SKIPPED, STRUCK = 3, 5
"""Steps that are not applied: discarded, and with a gradient that is not finite."""
FAULT = f"faults=[{{kind: inf_gradient, step: {STRUCK}, rank: 0, module: model.layers.1.mlp.down_proj}}]"


def trained(
    world: World, *, stage: int, masters: str, steps: int, more: Sequence[str] = (), save: str = "", load: str = ""
) -> dict[str, Any]:
    """Steps on different batches, clipped, two of them not applied: what each reports, and all checksums at the end.

    save: a folder, after the first half of the steps. load: a folder, instead of the first half.
    """
    with engine_of(world, _resolved(world, stage, masters, more)) as engine:
        first, rows, unchanged = 1, [], True
        if load:
            engine.load(Path(load), "deepspeed", TorchCheckpointEngine())
            first = steps // 2 + 1
        for step in range(first, steps + 1):
            health = engine.health(engine.forward_backward(batch_of(world, 2, seed=step), step=step))
            before = checksums_of(engine) if step in (SKIPPED, STRUCK) else {}
            update = engine.step(health, 0.01, apply=step != SKIPPED)
            rows.append((health.loss, health.grad_norm, update.applied, update.update_ratio))
            unchanged &= not before or checksums_of(engine) == before
            if save and step == steps // 2:
                engine.save(Path(save), "deepspeed", TorchCheckpointEngine())
        return {"rows": rows, "checksums": checksums_of(engine), "skipped_unchanged": unchanged}


def held(world: World, *, stage: int) -> dict[str, Any]:
    """The tensors that hold the masters, and their readers, after two steps."""
    with engine_of(world, _resolved(world, stage, "split")) as engine:
        take(engine, batch_of(world, 2, seed=1), step=1, lr=0.01)
        rows = {entry.what: entry for entry in read_ledger(engine, reduce="fp32")}
        flats = engine.deepspeed.basic_optimizer.splits
        parameter = next(iter(trainable_parameters(engine).values()))
        own = shard_of(engine, parameter)
        inside = {}
        with engine.whole_masters(), engine.whole_masters():
            inside["masters"] = masters_of(engine)
            inside["deepspeed"] = {
                name: safe_get_full_fp32_param(p).float() for name, p in trainable_parameters(engine).items()
            }
        return {
            "row": (rows["masters"].dtype, rows["masters"].bytes),
            "values": sum(flat.numel() for flat in flats),
            "memory": sum(flat.untyped_storage().nbytes() for flat in flats),
            "past": safe_get_full_fp32_param(parameter).isnan().any(),
            "part": own is None or torch.equal(own.master(3, 5), own.master()[3:8]),
            "outside": masters_of(engine),
            **inside,
        }


def written_wrong(world: World) -> tuple[str, dict[str, Any]]:
    """The error when one rank writes a master that the weight is not, and the masters once it is what it was."""
    with engine_of(world, _resolved(world, 2, "split")) as engine:
        before, text = masters_of(engine), ""
        try:
            with engine.whole_masters():
                if world.rank == 0:
                    flat = next(iter(engine.deepspeed.basic_optimizer.splits))
                    kept = flat.data[3].clone()
                    flat.data[3] += 1.0
        except UserError as error:
            text = str(error)
        with engine.whole_masters():
            if world.rank == 0:
                flat.data[3] = kept
        after = masters_of(engine)
        return text, {"same": all(torch.equal(after[name], before[name]) for name in before)}


def _resolved(world: World, stage: int, masters: str, more: Sequence[str] = ()) -> Any:
    settings = [f"precision.masters={masters}", "optimizer.gradient_clipping=0.5", "guard.max_update_ratio=10", FAULT]
    return resolve(world, stage=stage, compute="bf16", micro=2, overrides=[*settings, *more])
