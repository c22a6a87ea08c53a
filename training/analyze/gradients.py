"""How far the gradients of other dtypes are from FP32's, from the same masters and batch, on the manifest path.

The gradients are the reduced ones, through DeepSpeed's own backward pass, at every ZeRO stage. FP16 gets its loss scale
on the loss and it is divided out of the reduced gradient: a power of two, so both are exact.

Which error. Adam divides each gradient by the size of its own past, so what reaches the weights is each parameter's
*relative* error, however small its gradient is beside others. `error` is the root of the mean of their squares, every
value of the gradient counting alike. The error of the whole gradient's vector would be that of its few largest
parameters: for the demo's BF16 it was 0.003 after 30 steps, while a query projection's gradient was off by 0.043.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.loader import Batch
from modeling.linear_cross_entropy import label_loss_sum
from precision.manifest import load_manifest
from precision.parity import NEGLIGIBLE
from precision.regions import Regions
from training.engine import Engine
from training.engine.rng import generators, restore_generators
from training.engine.tensors import whole_gradient


@dataclass(frozen=True)
class GradientError:
    """Of one pass against FP32; the same on every rank. inf where something is not finite."""

    error: float
    """[fraction] Root of the mean of ||gradient - FP32's||^2 / ||FP32's||^2 over parameters, weighted by their size."""
    whole: float
    """[fraction] ||gradient - FP32's|| / ||FP32's|| over all parameters together."""
    parameter: str
    """Parameter whose gradient is furthest off, relative to its own norm."""
    parameter_error: float
    """[fraction] By how much."""
    loss: float
    """[fraction] |loss - FP32's| / |FP32's|."""


class Fp32Gradients:
    """FP32 gradients of one batch, in the main process's memory. Every method is a collective."""

    def __init__(self, engine: Engine, batch: Batch) -> None:
        """The engine's regions have to compute in FP32 now. The gradients are discarded afterwards."""
        self._engine, self._batch = engine, batch
        self._generators = generators(engine.place.device)
        self._gradients: dict[str, torch.Tensor] = {}
        self._loss = self._backward(1.0)
        for name, gradient in self._reduced(1.0):
            if engine.place.is_main:
                self._gradients[name] = gradient.cpu()
        engine.discard_quietly()

    def error(self, *, scale: float = 1.0) -> GradientError:
        """Run the same batch in whatever the regions compute in now, with the same random numbers, and compare.

        scale: factor on the loss, a power of two; it never shows in the result.
        """
        place = self._engine.place
        loss = self._backward(scale)
        off: dict[str, float] = {}
        for name, gradient in self._reduced(scale):
            if place.is_main:
                difference = gradient.cpu().double() - self._gradients[name].double()
                off[name] = float(difference.square().sum())
        self._engine.discard_quietly()
        there = abs(loss - self._loss) / max(abs(self._loss), 1e-30)
        return GradientError(*place.from_main((*self._judged(off), there if math.isfinite(there) else math.inf)))

    def _judged(self, off: dict[str, float]) -> tuple[float, float, str, float]:
        """From squared differences by parameter; those with next to no gradient are rounding noise and left out."""
        size = {name: float(self._gradients[name].double().square().sum()) for name in off}
        floor = NEGLIGIBLE**2 * max(size.values(), default=0.0)
        errors = {
            name: _ratio(off[name], size[name]) for name in off if size[name] > floor or not math.isfinite(off[name])
        }
        counts = {name: self._gradients[name].numel() for name in errors}
        mean = sum(counts[name] * errors[name] for name in errors) / max(sum(counts.values()), 1)
        worst = max(errors, key=lambda name: errors[name], default="")
        whole = _ratio(sum(off.values()), sum(size.values()))
        return math.sqrt(mean), math.sqrt(whole), worst, math.sqrt(errors.get(worst, 0.0))

    def _backward(self, scale: float) -> float:
        """Forward and backward passes of the mean loss over the batch, times `scale`; the loss."""
        engine, place, batch = self._engine, self._engine.place, self._batch
        restore_generators(self._generators, place.device)
        tokens = torch.tensor(float(batch.label_tokens), dtype=torch.float64, device=place.device)
        tokens = place.sum(tokens).clamp_(min=1.0)
        weight = float(scale * place.world_size / tokens)  # DeepSpeed averages over ranks
        total = torch.zeros((), dtype=torch.float64, device=place.device)
        for index, (inputs, labels) in enumerate(batch.micro_batches(place.device)):
            loss = label_loss_sum(engine.logits(inputs), labels)
            engine.backward(loss * weight, last=index == len(batch.input_ids) - 1)
            total += loss.detach().double()
        return float(place.sum(total) / tokens)

    def _reduced(self, scale: float) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._engine.model.named_parameters():
            gradient = whole_gradient(self._engine, parameter)
            if gradient is not None:
                yield name, gradient / scale


@contextmanager
def computing(engine: Engine, manifest: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the engine's model computes as this manifest's JSON says, default dtype and all."""
    before = engine.regions
    assert before is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "manifest.json"
        path.write_text(json.dumps(manifest))
        loaded = load_manifest(path)
    before.close()
    engine.regions = Regions(engine.model, loaded)
    try:
        yield
    finally:
        engine.regions.close()
        engine.regions = Regions(engine.model, before.manifest)


def validate(
    engine: Engine, candidates: Mapping[str, tuple[Mapping[str, Any], float]], batches: Sequence[Batch]
) -> dict[str, dict[str, Any]]:
    """How far each manifest's gradients are from FP32's, from the same masters, over whole batches. A collective.

    candidates: name to the manifest's JSON and the loss scale to run it at. `error` and `whole` are root mean squares
    over batches; `parameter` is the one furthest off on any batch, `parameter_error` by how much; `loss_error` is the
    largest relative distance of the loss. inf: something was not finite.
    """
    found: dict[str, list[GradientError]] = {name: [] for name in candidates}
    for batch in batches:
        reference = Fp32Gradients(engine, batch)
        for name, (manifest, scale) in candidates.items():
            with computing(engine, manifest):
                found[name].append(reference.error(scale=scale))
    return {name: _over_batches(errors) for name, errors in found.items()}


def _over_batches(errors: Sequence[GradientError]) -> dict[str, Any]:
    worst = max(errors, key=lambda error: error.parameter_error)
    return {
        "error": (sum(error.error**2 for error in errors) / len(errors)) ** 0.5,
        "whole": (sum(error.whole**2 for error in errors) / len(errors)) ** 0.5,
        "parameter": worst.parameter,
        "parameter_error": worst.parameter_error,
        "loss_error": max(error.loss for error in errors),
    }


def _ratio(off: float, size: float) -> float:
    """off / size; inf where off is not finite, or where it is all there is."""
    if not math.isfinite(off):
        return math.inf
    return off / size if size else (math.inf if off else 0.0)
