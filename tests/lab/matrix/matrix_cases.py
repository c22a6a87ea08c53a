"""Functions that test_matrix.py runs inside its processes, each on every rank."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from config.deepspeed.combinations import SETTINGS, Combination
from config.load import load_config
from data.batches.loader import Batch
from lab.matrix import run as matrix_run
from lab.matrix.cells import Cell
from modeling.linear_cross_entropy import IGNORED
from modeling.router_balance import RouterBalance
from precision import fp8
from tools.parity.oracle.optimizers import optimizer_of
from training.distributed import World
from training.engine.flat_optimizer import Pieces
from training.engine.sharded_pieces import ShardedPieces
from training.loss_scaler import LossScaler

STEPS = 6
"""The fewest in which the loss scale grows twice."""
UNSCALED_STEPS = 3
"""Steps of a cell without a loss scale."""


def measure(world: World, *, cells: list[Cell], upstream: bool) -> dict[str, dict[str, Any]]:
    """The matrix's results by the cell's name."""
    found = {}
    for cell in cells:
        steps = STEPS if upstream or cell.combination.compute in ("fp16", "mixed") else UNSCALED_STEPS
        found[cell.name] = matrix_run.measure(world, cell, steps=steps, upstream=upstream)
    return found


def scale_grows_at_once(world: World, *, stage: int) -> dict[str, Any]:
    """A cell whose loss scale changes in the middle of the step, as DeepSpeed's own does."""

    def update_scale(scaler: LossScaler, overflow: bool) -> None:
        scaler.policy.update(overflow)
        scaler.cur_scale = scaler.policy.scale

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossScaler, "update_scale", update_scale)
        return matrix_run.measure(world, Cell(Combination("cast", "fp16", stage)), steps=STEPS, upstream=False)


def loses_a_micro_batch(world: World, *, path: str, compute: str) -> dict[str, Any]:
    """A cell in which rank 1 learns nothing from its last micro-batch, and counts its labels all the same."""
    whole = matrix_run.batch_of

    def batch_of(world: World, step: int, *, accumulation: int) -> Batch:
        batch = whole(world, step, accumulation=accumulation)
        if world.rank == 0:
            return batch
        labels = batch.labels.clone()
        labels[-1] = IGNORED
        return replace(batch, labels=labels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_run, "batch_of", batch_of)
        cell = Cell(Combination(path, compute, 2), accumulation=4, clipping=True)
        return matrix_run.measure(world, cell, steps=STEPS, upstream=False)


def weights_by_way_of_bf16(world: World) -> dict[str, Any]:
    """A cell of FP8 whose operands are rounded to BF16 first."""
    rounded = fp8.rounded
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "rounded", lambda values, *how: rounded(values.bfloat16(), *how))
        cell = Cell(Combination("manifest", "fp8", 2), accumulation=4)
        return matrix_run.measure(world, cell, steps=UNSCALED_STEPS, upstream=False)


def norms_of_pieces(world: World) -> dict[str, Any]:
    """A cell of LAMB in which no norm is summed over the ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedPieces, "sums", Pieces.sums)
        cell = Cell(Combination("cast", "fp32", 2), accumulation=4, optimizer="lamb")
        return matrix_run.measure(world, cell, steps=UNSCALED_STEPS, upstream=False)


def balanced_by_micro_batch(world: World, *, compute: str) -> dict[str, Any]:
    """A cell whose balancing loss takes the experts' shares of each micro-batch, as transformers' does."""
    whole = RouterBalance.loss

    def loss(router: RouterBalance, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = router.counts()
        return whole(router, own * (counts[0].sum() / own[0].sum()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RouterBalance, "loss", loss)
        setting = next(row for row in SETTINGS if row.key == "model.balance_loss")
        cell = Cell(Combination("cast", compute, 2), accumulation=4, setting=setting)
        return matrix_run.measure(world, cell, steps=UNSCALED_STEPS, upstream=False)


def apart_from_adamw(world: World, *, optimizer: str) -> float:
    """The distance of the reference's masters from AdamW's, relative to how far these moved."""
    cell = Cell(Combination("cast", "fp32", 1), accumulation=4, optimizer=optimizer)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        overrides, path = cell.prepare(Path(folder))
        config = load_config(path, overrides, None)
        found = []
        for name in (optimizer, "adamw"):
            of_name = lambda model, section, name=name: optimizer_of(model, replace(section, name=name))  # noqa: E731
            patch.setattr(matrix_run, "optimizer_of", of_name)
            found.append(matrix_run.reference(config, cell.dtype, clipping=False, steps=STEPS, world=world))
    return matrix_run.errors(*found).masters


def raises(world: World) -> dict[str, Any]:
    """A cell in which one rank fails where the other does not."""
    masters = matrix_run.errors

    def errors(*arguments: Any) -> Any:
        if world.rank == 1:
            raise ValueError("only here")
        return masters(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_run, "errors", errors)
        return matrix_run.measure(world, Cell(Combination("manifest", "bf16", 2)), steps=STEPS)
