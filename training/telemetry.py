"""Precision telemetry: statistics of each module's gradients, activations and weights. Off by default.

Gradients are gathered one module at a time, between backward and step; activations are measured in the forward pass of
that step. The probe runs the step's micro-batches once more in FP32 from the masters and compares the real pass's
gradients with it: cosine and sign agreement by parameter. It costs one more pass and an FP32 copy of the
gradients in host memory on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch

from config.errors import UserError
from data.loader import Batch
from modeling.linear_cross_entropy import label_loss_sum
from precision.dtypes import DTYPES
from precision.statistics import (
    LOWEST_EXPONENT,
    ActivationMeter,
    Agreement,
    compare_gradients,
    exponent_histogram,
    gradient_statistics,
    master_drift,
    to_plain,
)
from training.engine import Engine
from training.engine.rng import generators, restore_generators
from training.engine.tensors import (
    flat_masters,
    shape_of,
    shard_of,
    trainable_parameters,
    whole_gradient,
    whole_master,
    whole_weight,
)


class Telemetry:
    """Measures one step at a time. Every method is a collective; `finish` returns the same numbers on all ranks."""

    def __init__(self, engine: Engine, *, probe: bool) -> None:
        """Raises UserError for a probe on the cast path at ZeRO-3, where no rank has whole masters to run."""
        if probe and engine.regions is None and engine.stage == 3:
            raise UserError(
                "telemetry.probe = true: at ZeRO-3 the FP32 pass needs precision.path = manifest, whose parameters are "
                "the masters; use it, or ZeRO-2, or telemetry.probe=false"
            )
        self._engine = engine
        self._probe = probe
        self._reference: dict[str, torch.Tensor] = {}
        self._meter: ActivationMeter | None = None
        self._before: list[torch.Tensor] = []

    @contextmanager
    def watching(self, batch: Batch) -> Iterator[None]:
        """Around the forward and backward passes of the step to measure; the probe runs before them."""
        if self._probe:
            self._reference = self._fp32_gradients(batch)
        with ActivationMeter(self._engine.model) as self._meter:
            yield

    def finish(self) -> dict[str, Any]:
        """Call between backward and step. Returns the fields of a `telemetry` event."""
        engine = self._engine
        modules: dict[str, Any] = {}
        agreement: dict[str, Agreement] = {}
        exponents: torch.Tensor | int = 0
        for module, group in groupby(trainable_parameters(engine).items(), key=lambda item: item[0].rpartition(".")[0]):
            gradients = [(name, whole_gradient(engine, parameter)) for name, parameter in group]
            whole = [(name, gradient) for name, gradient in gradients if gradient is not None]
            modules |= gradient_statistics(whole, self._dtype(module), scale=engine.loss_scale)
            exponents = sum((exponent_histogram(gradient).counts for _, gradient in whole), exponents)
            if self._reference:
                agreement |= compare_gradients(whole, [(name, self._reference[name]) for name, _ in whole])
        assert self._meter is not None
        plain = to_plain({"gradients": modules, "activation_max": self._meter.maxima, "probe": agreement})
        by_rank = engine.world.gather_objects(plain["activation_max"])  # each rank has its own samples
        plain["activation_max"] = {name: max(seen[name] for seen in by_rank) for name in by_rank[0]}
        self._reference, self._meter = {}, None
        return {**plain, "drift": self._drift(), "gradient_exponents": _trimmed(exponents)}

    def hold_masters(self) -> None:
        """Call right before the optimizer step of a measured step. Copies this rank's masters."""
        self._before = [master.detach().clone() for master in flat_masters(self._engine)]

    def lost_updates(self) -> dict[str, float]:
        """Share of each module's updated weights that compute with the same number as before; after the step.

        The update was smaller than half a unit in the last place of the dtype that computes, so it shows only once more
        of them have added up in the master. Modules in FP32, whose weights are the masters, are left out.
        """
        engine, world = self._engine, self._engine.world
        modules = [(name.rpartition(".")[0], parameter) for name, parameter in trainable_parameters(engine).items()]
        names = [name for name in dict.fromkeys(name for name, _ in modules) if self._dtype(name) != torch.float32]
        counts = torch.zeros(len(names), 2, dtype=torch.float64, device=world.device)
        after = flat_masters(engine)
        place = {id(flat): number for number, flat in enumerate(after)}
        for name, parameter in modules:
            shard = shard_of(engine, parameter) if name in names else None
            if shard is None:
                continue
            dtype = self._dtype(name)
            old = shard.of(self._before[place[id(shard.flat)]]) if engine.stage else self._before_of(parameter)
            new = shard.of(shard.flat)
            updated = new != old
            lost = updated & (new.to(dtype) == old.to(dtype))
            counts[names.index(name)] += torch.stack([lost.sum(), updated.sum()]).double()
        self._before = []
        rows = (counts if engine.stage == 0 else world.sum(counts)).tolist()
        return {name: lost / updated for name, (lost, updated) in zip(names, rows, strict=True) if updated}

    def _before_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """At ZeRO-0, where every parameter is its own master."""
        for flat, before in zip(flat_masters(self._engine), self._before, strict=True):
            if flat.data_ptr() == parameter.data_ptr():
                return before.view(-1)
        raise LookupError("a trained parameter is in no group of the optimizer")

    def _dtype(self, module: str) -> torch.dtype:
        """The dtype in which the module's gradients are computed."""
        regions = self._engine.regions
        return DTYPES[regions.dtypes.get(module, "fp32") if regions is not None else self._engine.compute]

    def _drift(self) -> dict[str, float] | None:
        """Largest and RMS relative distance of 16-bit parameters from their rounded masters; None in FP32."""
        engine = self._engine
        if engine.compute == "fp32":
            return None
        largest, squares, count = 0.0, 0.0, 0
        for parameter in trainable_parameters(engine).values():
            drift = master_drift(whole_master(engine, parameter), whole_weight(engine, parameter))
            largest = max(largest, float(drift.maximum))
            squares += float(drift.rms) ** 2 * shape_of(parameter).numel()
            count += shape_of(parameter).numel()
        return {"maximum": largest, "rms": math.sqrt(squares / max(count, 1))}

    def _fp32_gradients(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Gradients of the step's mean loss in FP32, by name, averaged over ranks, with the step's random numbers."""
        engine, device = self._engine, self._engine.world.device
        before = generators(device)
        found = self._through_regions(batch) if engine.regions is not None else self._through_masters(batch)
        restore_generators(before, device)
        return found

    def _through_regions(self, batch: Batch) -> dict[str, torch.Tensor]:
        """On the manifest path: the same modules, every region in FP32."""
        engine, regions = self._engine, self._engine.regions
        assert regions is not None
        before = dict(regions.dtypes)
        for name in before:
            regions.set(name, "fp32", "telemetry probe")
        engine.forward_backward(batch, step=0)
        pairs = [(name, whole_gradient(engine, parameter)) for name, parameter in engine.model.named_parameters()]
        engine.discard_gradients()
        for name, compute in before.items():
            regions.set(name, compute, "telemetry probe")
        return {name: gradient.cpu() for name, gradient in pairs if gradient is not None}

    def _through_masters(self, batch: Batch) -> dict[str, torch.Tensor]:
        """On the cast path: the module called with the masters in place of its 16-bit parameters."""
        engine, device = self._engine, self._engine.world.device
        masters = {
            name: whole_master(engine, parameter).requires_grad_()
            for name, parameter in trainable_parameters(engine).items()
        }
        weights = {name: whole_weight(engine, p).float() for name, p in _frozen(engine)}
        tokens = engine.world.sum(torch.tensor(float(batch.label_tokens), dtype=torch.float64, device=device))
        for inputs, labels in batch.micro_batches(device):
            options = {**inputs, "use_cache": False}
            logits = torch.func.functional_call(engine.model, masters | weights, args=(), kwargs=options).logits
            (label_loss_sum(logits, labels) / tokens.clamp(min=1).float()).backward()
        found = {}
        for name, master in masters.items():
            gradient = torch.zeros_like(master) if master.grad is None else master.grad
            found[name] = engine.world.sum(gradient).detach().cpu()
        return found


def _frozen(engine: Engine) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, p) for name, p in engine.model.named_parameters() if not p.requires_grad)


def _trimmed(counts: torch.Tensor | int) -> dict[str, Any]:
    """{lowest exponent, counts by power of two} without empty ends; empty counts where there is no gradient."""
    numbers = counts.tolist() if isinstance(counts, torch.Tensor) else []
    used = [index for index, count in enumerate(numbers) if count]
    if not used:
        return {"lowest": 0, "counts": []}
    return {"lowest": LOWEST_EXPONENT + used[0], "counts": numbers[used[0] : used[-1] + 1]}
