"""One point of a survey: ranges, FLOPs and sensitivities of every region, on one batch, from the current masters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from data.batches.loader import Batch
from precision.manifest import can_be_fp8, find_regions
from precision.observe import Observation
from tools.analyze.gradients import Fp32Gradients, rms
from tools.analyze.proposal import Limits, Unit, largest_scale, pattern_of
from tools.analyze.ranges import OperandMeter, Ranges, gradients_counted
from tools.analyze.stored import Stored, StoredPeaks, largest_of_each
from training.engine import Engine


@dataclass(frozen=True)
class Point:
    """Measurements after one step; the same on every rank."""

    ranges: Ranges
    stored: Stored
    flops: dict[str, int]
    """Module name to forward matmul FLOPs on the main process."""
    errors: list[dict[str, float]]
    """Errors of each unit, by dtype; fp8 only for linear layers, and if requested."""
    casts: dict[str, dict[str, str]]
    """Region to assigned dtype to the dtype it computed in instead, if its module or kernel casts by itself."""


def units_of(engine: Engine, most_regions: int) -> list[Unit]:
    """The matmul regions, one by one or by pattern, without measurements."""
    names = [name for name, kind in find_regions(engine.model).items() if kind != "norm"]
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(name if len(names) <= most_regions else pattern_of(name), []).append(name)
    return [Unit(tuple(members), 0, {}) for members in grouped.values()]


def measure(
    engine: Engine,
    batch: Batch,
    units: Sequence[Unit],
    *,
    step: int,
    limits: Limits,
    text_of: Callable[[int], str],
    judge: Callable[[Stored], None],
) -> Point:
    """Measure on this batch; every region must compute in FP32 now. A collective; changes no weight.

    text_of: the text of a token. judge: called with the stored peaks before anything takes long.
    """
    model, world = engine.model, engine.world
    kinds = find_regions(model)
    ranges = Ranges(kinds, world.device)
    with torch.no_grad(), OperandMeter(model, kinds, ranges) as operands:
        for inputs, labels in batch.micro_batches(world.device):
            engine.score(inputs, labels)
    with gradients_counted(model, kinds, ranges), StoredPeaks(model, text_of) as peaks:
        reference = Fp32Gradients(engine, batch)
    stored = largest_of_each(world.gather_objects(peaks.found))
    judge(stored)
    world.sum(ranges.counts)
    rows = world.gather(ranges.maxima.reshape(-1))
    ranges.maxima.copy_(rows.amax(0).reshape(ranges.maxima.shape))
    scale = largest_scale(ranges.spreads(), limits)
    errors = []
    for index, unit in enumerate(units):
        if world.is_main:
            print(f"after {step} steps: {unit.names[0]} alone, {index + 1} of {len(units)}", flush=True)
        by_dtype = {}
        bears = limits.fp8 > 0 and all(can_be_fp8(model, name) for name in unit.names)
        for dtype in ("bf16", "fp16", "fp8") if bears else ("bf16", "fp16"):
            with _in_dtype(engine, unit, dtype):
                by_dtype[dtype] = reference.error(scale=scale if dtype == "fp16" else 1.0).error
        errors.append(by_dtype)
    flops = world.from_main(dict(operands.region_flops))
    return Point(ranges, stored, flops, errors, _casts(engine, reference, units))


def _casts(engine: Engine, reference: Fp32Gradients, units: Sequence[Unit]) -> dict[str, dict[str, str]]:
    """`Point.casts`, observed in a training step: kernels differ without gradients or dropout. A collective."""
    every = Unit(tuple(name for unit in units for name in unit.names), 0, {})
    found: dict[str, dict[str, str]] = {}
    for dtype in ("bf16", "fp16"):
        with _in_dtype(engine, every, dtype), Observation(engine.model) as seen:
            reference.error()
        for by_rank in engine.world.gather_objects({name: seen.computed.get(name, set()) for name in every.names}):
            for name, computed in by_rank.items():
                if computed - {dtype}:
                    found.setdefault(name, {})[dtype] = " and ".join(sorted(computed))
    return found


@contextmanager
def _in_dtype(engine: Engine, unit: Unit, dtype: str) -> Iterator[None]:
    """Context manager: only this unit's regions compute in `dtype`; everything else stays FP32."""
    regions = engine.regions
    assert regions is not None
    for name in unit.names:
        regions.set(name, dtype)
    try:
        yield
    finally:
        for name in unit.names:
            regions.set(name, "fp32")


def summary(units: Sequence[Unit], points: Sequence[Point]) -> tuple[list[Unit], int]:
    """Units with their FLOPs and their RMS error over the points, and the FLOPs outside all regions."""
    flops = points[-1].flops
    measured = []
    for index, unit in enumerate(units):
        errors = {dtype: rms([point.errors[index][dtype] for point in points]) for dtype in points[0].errors[index]}
        measured.append(Unit(unit.names, sum(flops.get(name, 0) for name in unit.names), errors))
    return measured, sum(flops.values()) - sum(unit.flops for unit in measured)
