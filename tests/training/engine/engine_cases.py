"""Code run inside the processes of test_engine.py. Every function is called on every rank."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from precision.manifest import load_manifest
from precision.regions import Regions
from tests.support.models.plain_steps import mean_label_loss, plain_steps
from tests.support.models.small_run import batch_of, changed_json, engine_of, masters_of, plain_model, resolve, take
from training.distributed import World
from training.engine import Engine
from training.engine.ledger import PrecisionError, read_ledger
from training.engine.tensors import momentum_norm


def one_step(world: World, *, stage: int, compute: str, micro: int, mask: str, **options: Any) -> dict[str, Any]:
    """Loss, norm, masters and metrics of one engine step from the seeded weights."""
    resolved = resolve(world, stage=stage, compute=compute, micro=micro, **options)
    with engine_of(world, resolved) as engine:
        health, update = take(engine, batch_of(world, micro, seed=1, mask=mask), step=1, lr=0.001)
        return {
            "loss": health.loss,
            "grad_norm": health.grad_norm,
            "applied": update.applied,
            "clip": update.clip_coefficient,
            "after": masters_of(engine),
            "metrics": health.metrics,
            "notes": engine.notes,
        }


def reference_step(world: World, *, mask: str, manifest: str | None = None) -> dict[str, Any]:
    """The same step in plain torch, FP32, one process, the whole batch at once, no DeepSpeed."""
    resolved = resolve(world, stage=0, compute="fp32", micro=8)
    with engine_of(world, resolved) as engine:
        weights = masters_of(engine)
    model = plain_model(resolved, weights)
    if manifest is not None:
        Regions(model, load_manifest(Path(manifest)))
    loss_of = partial(mean_label_loss, mask=mask)
    loss, norm, _ = plain_steps(model, resolved.config.optimizer, steps=1, lr=0.001, loss_of=loss_of)
    return {"loss": loss, "grad_norm": norm, "after": {name: p.detach() for name, p in model.named_parameters()}}


def norms_over_steps(world: World, *, stage: int, compute: str, steps: int, overrides: list[str]) -> list[dict]:
    """The reports of `steps` steps on different batches."""
    resolved = resolve(world, stage=stage, compute=compute, overrides=overrides)
    rows = []
    with engine_of(world, resolved) as engine:
        for step in range(1, steps + 1):
            health, update = take(engine, batch_of(world, 4, seed=step), step=step, lr=0.001)
            rows.append(
                {
                    "loss": health.loss,
                    "grad_norm": health.grad_norm,
                    "change": update.scale_change.reason if update.scale_change else None,
                    "momentum": momentum_norm(engine),
                    "applied": update.applied,
                }
            )
        rows[-1]["masters"] = masters_of(engine)
    return rows


def masters_over_steps(
    world: World, *, stage: int, compute: str, steps: int, micro: int = 2, overrides: Sequence[str] = ()
) -> list[dict[str, torch.Tensor]]:
    """Before the first step and after each, of steps on different batches."""
    with engine_of(world, resolve(world, stage=stage, compute=compute, micro=micro, overrides=overrides)) as engine:
        found = [masters_of(engine)]
        for step in range(1, steps + 1):
            take(engine, batch_of(world, micro, seed=step), step=step, lr=0.01)
            found.append(masters_of(engine))
        return found


class _Reductions(TorchDispatchMode):
    """Counts reductions over ranks, and those of more than one value."""

    all = large = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d" and "reduce" in function.name():
            self.all += 1
            self.large += any(isinstance(leaf, torch.Tensor) and leaf.numel() > 1 for leaf in tree_leaves(args))
        return function(*args, **(kwargs or {}))


def masters_on_one_rank(
    world: World, *, stage: int, compute: str, variant: str, reduces: bool
) -> tuple[dict[str, torch.Tensor], int, int]:
    """Masters after two steps, and the numbers of reductions, of gradients and in all.

    reduces: as DeepSpeed does on one rank.
    """
    with engine_of(world, resolve(world, stage=stage, compute=compute, micro=2, variant=variant)) as engine:
        if reduces:
            optimizer: Any = engine.deepspeed.optimizer
            optimizer.reduce_scatter = True
            for name in ("gradient_reduction_w_predivide", "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"):
                delattr(optimizer, name)
            del engine.deepspeed.allreduce_no_retain
        with _Reductions() as counted:
            for step in (1, 2):
                take(engine, batch_of(world, 2, seed=step), step=step, lr=0.01)
        return masters_of(engine), counted.large, counted.all


def norms_of_skipped(world: World, *, stage: int, compute: str) -> list[float]:
    """The gradient norm of a batch, twice, where masters are in host memory and each step is discarded."""
    found = []
    with engine_of(world, resolve(world, stage=stage, compute=compute, micro=2, variant="_offload")) as engine:
        for step in (1, 2):
            found.append(engine.health(engine.forward_backward(batch_of(world, 2, seed=1), step=step)).grad_norm)
            engine.discard_gradients()
    return found


def partitioned_build(world: World) -> dict[str, Any]:
    """The number of parameters that this rank holds after a ZeRO-3 build, and the weights it drew."""
    resolved = resolve(world, stage=3, compute="fp32", overrides=["model.config.tie_word_embeddings=false"])
    with engine_of(world, resolved) as engine:
        parameters = list(engine.model.parameters())
        return {
            "whole": sum(p.ds_numel for p in parameters),
            "held": sum(p.ds_tensor.numel() for p in parameters),
            "resident": sum(p.numel() for p in parameters if not p.ds_persist),
        }


def ledger(world: World, *, stage: int, compute: str, reduce: str, promise: str) -> tuple[dict[str, str], str]:
    """The ledger after a step, and the error when the config's promise on reduction is `promise` instead."""
    resolved = resolve(world, stage=stage, compute=compute, overrides=[f"precision.reduce={reduce}"])
    with engine_of(world, resolved) as engine:
        read_ledger(engine, reduce=reduce)
        take(engine, batch_of(world, 4, seed=1), step=1, lr=0.001)
        rows = {entry.what: entry.dtype for entry in read_ledger(engine, reduce=reduce)}
        return rows, complaint(engine, reduce=promise)


def complaint(engine: Engine, *, reduce: str = "fp32") -> str:
    """The ledger's complaint about what is not as promised; empty when there is none."""
    try:
        read_ledger(engine, reduce=reduce)
    except PrecisionError as error:
        return str(error)
    return ""


def sums_in_16_bits(world: World) -> str:
    """The ledger's complaint where cuBLAS may add parts of a product in 16 bits."""
    matmul = torch.backends.cuda.matmul
    with engine_of(world, resolve(world, stage=2, compute="bf16")) as engine:
        matmul.allow_bf16_reduced_precision_reduction = True
        try:
            return complaint(engine)
        finally:
            matmul.allow_bf16_reduced_precision_reduction = False


def stepped_back(world: World, *, folder: str, compute: str, secondary: int) -> dict[str, Any]:
    """A saved step, two more with evaluations between, back to what was saved, two more; ZeRO-3, two engines in a row.

    secondary: zero_hpz_partition_size.
    """
    tag = f"{world.world_size}-{secondary}-{compute}"
    zero = {"zero_hpz_partition_size": secondary, "stage3_param_persistence_threshold": 0}
    changed = changed_json(Path(folder), f"zero3_{compute}", **zero)
    resolved = resolve(world, stage=3, compute=compute, micro=2, overrides=[changed])
    with engine_of(world, resolved):
        pass
    losses, copies = [], []
    with engine_of(world, resolved) as engine:

        def train(step: int) -> None:
            outcome = engine.forward_backward(batch_of(world, 2, seed=step), step=step)
            copies.append(
                {
                    tuple(copy.shape) == (-(-parameter.ds_numel // secondary),)
                    for parameter in engine.model.parameters()
                    if (copy := parameter.ds_secondary_tensor) is not None
                }
            )
            engine.step(health := engine.health(outcome), 0.01)
            losses.append((health.loss, health.grad_norm, engine.evaluate([batch_of(world, 2, seed=9)]).loss))

        train(1)
        engine.save(Path(folder), tag)
        train(2)
        train(3)
        engine.load(Path(folder), tag, TorchCheckpointEngine())
        train(2)
        train(3)
        return {"losses": losses, "copies": copies, "masters": masters_of(engine)}


def rounded_buffer(world: World, *, stage: int) -> tuple[dict[str, str], str]:
    """The ledger of a Gemma in BF16, and what it says when a buffer has been cast to 16 bits behind its back."""
    overrides = ["model.architecture=gemma"]
    resolved = resolve(world, stage=stage, compute="bf16", overrides=overrides)
    with engine_of(world, resolved) as engine:
        rows = {entry.what: entry.dtype for entry in read_ledger(engine, reduce="fp32")}
        rotary: Any = engine.model.get_submodule("model.rotary_emb")
        rotary.inv_freq = rotary.inv_freq.bfloat16()
        return rows, complaint(engine)


def broken_master(world: World, *, stage: int) -> str:
    """The ledger's complaint when an optimizer's master has been cast to 16 bits behind its back."""
    resolved = resolve(world, stage=stage, compute="bf16")
    with engine_of(world, resolved) as engine:
        optimizer = engine.deepspeed.optimizer
        groups = optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups
        groups[0].data = groups[0].data.bfloat16()
        return complaint(engine)
