"""Functions that test_matrix.py runs inside its processes, each on every rank."""

from dataclasses import replace
from typing import Any

import pytest

from config.deepspeed.combinations import Combination
from data.batches.loader import Batch
from lab.matrix import run as matrix_run
from lab.matrix.cells import Cell
from modeling.linear_cross_entropy import IGNORED
from training.distributed import World
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
