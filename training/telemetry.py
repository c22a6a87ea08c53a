"""Precision telemetry: statistics of each module's gradients, activations and weights, measured at intervals.

Every rank measures its own shards and micro-batches; sums and maxima over ranks are taken after the step. The probe
reruns the step's micro-batches in FP32 from the masters, and gathers whole gradients, module by module, to compare.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from config.errors import UserError
from data.batches.loader import Batch
from modeling.activation_checkpointing import blocks_of
from modeling.build import attending_in_fp32
from modeling.compiling import CompiledBlock
from precision import sampling
from precision.activation_signals import AttentionMeter, ChannelMeter, channel_figures
from precision.dtypes import DTYPES
from precision.fp8 import FORMATS, FlushMeter, rounded
from precision.statistics import ActivationMeter, Agreement, compare_gradients, to_plain
from training.engine import Engine, tensors
from training.engine.adam_signals import COLUMNS as ADAM_COLUMNS
from training.engine.adam_signals import adam_figures, adam_sums
from training.engine.rng import generators, restore_generators
from training.engine.tensor_slices import counts_here

Figure = Literal["attention", "channels", "adam"]
FIGURES: tuple[Figure, ...] = get_args(Figure)
"""Early-warning figures that are measured separately (docs/early-warnings.md)."""
_DIGITS = 6  # significant digits of a recorded number: telemetry has thousands of them
# Columns of a parameter's numbers: squared gradients and the largest; distance of weights from their rounded masters,
# and the squares of that; squared change and size of the masters, how many changed, how many of these without effect;
# how many sampled gradients are below the dtype's normal numbers, are flushed, are not 0; then Adam's.
_SQUARES, _LARGEST, _APART, _APART_SQUARES, _CHANGE, _SIZE, _UPDATED, _LOST, _SMALL, _FLUSHED, _NONZERO = range(11)
_ADAM = slice(11, 11 + len(ADAM_COLUMNS))
_MAXIMA = (_LARGEST, _APART, _ADAM.stop - 1)  # the maximum over ranks counts; the other columns are summed


class Telemetry:
    """Measures a step: `watching` its passes (a collective with the probe), `measure`, then `finish` (a collective)."""

    def __init__(self, engine: Engine, *, probe: bool, figures: Collection[Figure] = FIGURES) -> None:
        """figures: those of FIGURES to measure; events leave out the others. Raises UserError for a probe on the cast
        path at ZeRO-3, where no rank has whole masters to run."""
        if probe and engine.regions is None and engine.stage == 3:
            raise UserError(
                "telemetry.probe = true: at ZeRO-3 the FP32 pass needs precision.path = manifest, whose parameters are "
                "the masters; use it, or ZeRO-2, or telemetry.probe=false"
            )
        self._engine, self._probe, self._figures = engine, probe, figures
        self._parameters = tensors.trainable_parameters(engine)
        self._numbers = self._exponents = torch.zeros(0)
        self._scale = 1.0
        self._modules = [name.rpartition(".")[0] for name in self._parameters]
        self._rows: dict[str, list[int]] = defaultdict(list)  # of a module's parameters, in the model's order
        for row, module in enumerate(self._modules):
            self._rows[module].append(row)
        names = {module: name for name, module in engine.model.named_modules()}
        self._blocks = {names[block]: block for block in blocks_of(engine.model)}
        self.forget()

    def forget(self) -> None:
        """Drop what was seen of a step, which a later one must not be compared with."""
        self._reference: dict[str, torch.Tensor] = {}
        self._agreement: dict[str, Agreement] = {}
        self._masters: dict[int, tuple[tensors.Shard, torch.Tensor]] = {}
        self._samples: dict[int, torch.Tensor] = {}
        model = self._engine.model
        self._meter = ActivationMeter(model, [*model.modules()])  # which watches nothing
        self._attention, self._channels = AttentionMeter(model, active=False), ChannelMeter({})
        self._flushed = FlushMeter((), self._engine.world.device)

    @contextmanager
    def watching(self, batch: Batch) -> Iterator[None]:
        """Context for the measured step's forward and backward passes; the probe runs before them."""
        regions, device = self._engine.regions, self._engine.world.device
        if self._probe:
            before = generators(device)
            with attending_in_fp32(self._engine.model):
                self._reference = self._through_masters(batch) if regions is None else self._through_regions(batch)
            restore_generators(before, device)
        model, unhooked = self._engine.model, self._engine.loss_path.unhooked()
        compiled = any(isinstance(block.__dict__.get("forward"), CompiledBlock) for block in self._blocks.values())
        whole = self._engine.world.tensor is None  # figures are sums over ranks, which would have different heads
        wanted = "attention" in self._figures
        self._attention = AttentionMeter(model, active=wanted and whole and not compiled)
        self._channels = ChannelMeter(dict(self._blocks) if "channels" in self._figures else {})
        unmeasured = unhooked | {model} if self._engine.loss_path.chunked else unhooked
        self._meter = ActivationMeter(model, unmeasured)
        with ExitStack() as stack:
            if regions is not None and regions.uses("fp8"):
                self._flushed = FlushMeter(regions.names_in("fp8"), device)
                regions.fp8_count = self._flushed.of
                stack.callback(setattr, regions, "fp8_count", None)
            for meter in (self._attention, self._channels, self._meter):
                stack.enter_context(meter)
            yield

    @torch.no_grad()
    def measure(self) -> None:
        """Measure weights and gradients, which must be finite, between backward and step."""
        engine = self._engine
        device, scale = engine.world.device, engine.loss_scale
        self._scale = scale  # the step may change it
        self._numbers = torch.zeros(len(self._parameters), _ADAM.stop, dtype=torch.float64, device=device)
        self._exponents = torch.zeros(sampling.EXPONENTS - 1, dtype=torch.float64, device=device)
        gradients: dict[int, torch.Tensor] = {}
        for row, parameter in enumerate(self._parameters.values()):
            shard = self._own_shard(parameter)
            if shard is None or not shard.length:
                continue
            self._masters[row] = (shard, sampling.sampled(shard.master()))
            gradient = tensors.local_gradient(parameter, shard, engine.stage)
            if gradient is not None:
                gradients[row] = gradient
        if gradients:
            rows, found = torch.tensor(list(gradients), device=device), list(gradients.values())
            self._numbers[rows, _SQUARES] = sampling.sums_of_squares(found).to(device) / scale**2
            self._numbers[rows, _LARGEST] = sampling.largest(found).to(device) / scale
            self._samples = {row: sampling.sampled(values).float() / scale for row, values in gradients.items()}
            counts = sampling.exponent_counts(list(self._samples.values())).to(device)
            bins = torch.tensor([self._bins(self._modules[row]) for row in gradients], device=device)
            self._numbers[rows, _SMALL : _NONZERO + 1] = sampling.counts_in_bins(counts, bins).double()
            self._exponents = counts[:, 1 : sampling.EXPONENTS].sum(0).double()
        if engine.compute != "fp32" and engine.stage > 0:
            self._measure_drift()
        if self._reference:
            self._agreement = self._compare()

    def _bins(self, module: str) -> tuple[int, int, int]:
        """Numbers of `exponent_counts` bins for gradients below the dtype's normal numbers, flushed to zero, or any."""
        info = torch.finfo(self._dtype(module))
        normal = info.smallest_normal / self._scale
        return sampling.bins_below(normal), sampling.bins_below(normal * info.eps / 2), sampling.EXPONENTS

    def _own_shard(self, parameter: nn.Parameter) -> tensors.Shard | None:
        """The part of a parameter that this rank measures: at ZeRO-0, where every rank has all of it, an equal share;
        None of a replica that the first of the ranks that share matrices measures."""
        engine = self._engine
        if not counts_here(parameter, engine.world.tensor):
            return None
        if engine.stage > 0:
            return tensors.shard_of(engine, parameter)
        rank, ranks, count = engine.world.zero_rank, engine.world.zero_ranks, parameter.numel()
        start, end = rank * count // ranks, (rank + 1) * count // ranks
        return tensors.Shard(parameter, start, start, end - start)

    def _measure_drift(self) -> None:
        """Measure the distance of the 16-bit weights from this rank's masters; almost always 0."""
        stage, parameters = self._engine.stage, list(self._parameters.values())
        apart = []
        for row, (shard, _) in self._masters.items():
            weight = tensors.local_weight(parameters[row], shard, stage)
            apart.append(sampling.largest_of(weight - shard.master().to(weight.device, weight.dtype)))
        far = torch.stack(apart).tolist() if apart else []
        for row in [row for row, distance in zip(self._masters, far, strict=True) if distance != 0]:  # true for nan
            shard = self._masters[row][0]
            weight = tensors.local_weight(parameters[row], shard, stage)
            self._numbers[row, _APART : _APART_SQUARES + 1] = sampling.distances(
                shard.master().to(weight.device), weight
            )

    def _measure_update(self) -> None:
        """Measure the step on samples of the masters: size of the change, how many changed, how many without effect."""
        for row, (shard, before) in self._masters.items():
            after, module = sampling.sampled(shard.master()), self._modules[row]
            updated = after != before
            lost = updated & (self._rounded(after, module) == self._rounded(before, module))
            found = ((after - before).double().square(), before.double().square(), updated, lost)
            sums = torch.stack([values.sum().double() for values in found])
            self._numbers[row, _CHANGE : _LOST + 1] = sums.to(self._numbers.device) * (shard.length / len(before))

    def _measure_averages(self, clip: float) -> None:
        parameters = list(self._parameters.values())
        for row, gradient in self._samples.items():
            if len(tensors.shape_of(parameters[row])) < 2:
                continue  # figures from a vector's few values jump even in a healthy run
            sums = adam_sums(self._engine, self._masters[row][0], gradient * clip)
            if sums is not None:
                self._numbers[row, _ADAM] = sums.to(self._numbers.device)

    @torch.no_grad()
    def finish(self, *, applied: bool, clip: float = 1.0) -> dict[str, Any]:
        """The fields of a `telemetry` event. applied: whether the weights changed. clip: factor on the gradient."""
        if applied:
            self._measure_update()
            if "adam" in self._figures:
                self._measure_averages(clip)
        names, maxima = self._meter.names, self._meter.maxima
        unseen = torch.full((), -1.0, device=self._engine.world.device)
        seen = torch.stack([unseen, *(maxima.get(name, unseen) for name in names)])[1:].double()
        flushed = self._flushed.counts
        logits = [largest.double().view(1) for largest in self._attention.largest.values()]
        entropies, squares = self._attention.entropies, self._channels.squares
        world, signals = self._engine.world, [tensor.reshape(-1) for tensor in (*entropies.values(), *squares.values())]
        added = [self._numbers.reshape(-1), self._exponents, flushed.reshape(-1), *signals]
        numbers, exponents, flushes, *sums = world.sum(torch.cat(added)).cpu().split([len(part) for part in added])
        maxima_of = [self._numbers[:, _MAXIMA].reshape(-1), seen, *logits]
        largest, seen, *tops = world.maximum(torch.cat(maxima_of)).cpu().split([len(part) for part in maxima_of])
        total = numbers.view_as(self._numbers)
        total[:, _MAXIMA] = largest.view(-1, len(_MAXIMA))
        activations = {name: _short(value) for name, value in zip(names, seen.tolist(), strict=True)}
        fields = {
            "gradients": self._gradients(total),
            "activation_max": {name: value for name, value in activations.items() if value != -1},
            "probe": to_plain(self._agreement),
            "drift": self._drift(total),
            "update_ratio": _ratio(total[:, _CHANGE].sum(), total[:, _SIZE].sum()) if applied else None,
            "update_ratios": {
                module: _short(_ratio(total[rows, _CHANGE].sum(), total[rows, _SIZE].sum()))
                for module, rows in (self._rows.items() if applied else ())
            },
            "lost_updates": self._lost(total),
            "gradient_exponents": _trimmed(exponents),
            **self._forward_signals([float(top) for top in tops], iter(sums)),
            "adam": self._averages(total) if applied else {},
            "embedding_share": self._embedding_share(total),
        }
        if self._flushed.modules:
            shares = self._flushed.shares(flushes.view_as(flushed))
            fields["fp8_flushed"] = {name: _shortened(row) for name, row in shares.items()}
        self.forget()
        return fields

    def _forward_signals(self, largest: list[float], sums: Iterator[torch.Tensor]) -> dict[str, Any]:
        """Figures of attention and channels, over ranks. largest: logits. sums: totals of the meters."""
        attention, channels = {}, {}
        for name, logit in zip(self._attention.entropies, largest, strict=True):
            shares, counts = next(sums).view(2, -1)
            heads = shares / counts  # nan for sequences of one token
            figures = {"logit": logit, "entropy": float(heads.mean()), "lowest_entropy": float(heads.min())}
            attention[name] = _shortened(figures)
        for name in self._channels.squares:
            kurtosis, outliers = channel_figures(next(sums))
            channels[name] = {"kurtosis": _short(kurtosis), "outliers": outliers}
        return {"attentions": attention, "channels": channels}

    def _averages(self, total: torch.Tensor) -> dict[str, dict[str, float]]:
        """RMS_t and the signal's share of gradients (training/engine/adam_signals.py) for each module with a matrix."""
        found = {}
        for module, rows in self._rows.items():
            *sums, _ = total[rows, _ADAM].sum(0).tolist()
            if figures := adam_figures(self._engine, [*sums, float(total[rows, _ADAM][:, -1].max())]):
                found[module] = _shortened(figures)
        return found

    def _embedding_share(self, total: torch.Tensor) -> float | None:
        """The embedding's share of the squared gradient norm; None if no embedding is trained."""
        embedding = self._engine.model.get_input_embeddings()
        rows = [row for row, p in enumerate(self._parameters.values()) if p is getattr(embedding, "weight", None)]
        everything = float(total[:, _SQUARES].sum())
        return _short(float(total[rows, _SQUARES].sum()) / everything) if rows and everything else None

    def _gradients(self, total: torch.Tensor) -> dict[str, dict[str, float]]:
        """Norm, RMS and largest value of each module, and the shares that are subnormal or lost in its dtype."""
        shapes = [tensors.whole_shape_of(parameter).numel() for parameter in self._parameters.values()]
        found = {}
        for module, rows in self._rows.items():
            squares, values = float(total[rows, _SQUARES].sum()), sum(shapes[row] for row in rows)
            small, flushed, nonzero = total[rows, _SMALL : _NONZERO + 1].sum(0).tolist()
            measures = {
                "norm": math.sqrt(squares),
                "rms": math.sqrt(squares / max(values, 1)),
                "maximum": float(total[rows, _LARGEST].max()),
                "below_normal": small / max(nonzero, 1),
                "flushed": flushed / max(nonzero, 1),
            }
            found[module] = _shortened(measures)
        return found

    def _drift(self, total: torch.Tensor) -> dict[str, Any] | None:
        """Largest and RMS relative distance of 16-bit parameters from their rounded masters; None in FP32."""
        if self._engine.compute == "fp32":
            return None
        values = sum(tensors.whole_shape_of(parameter).numel() for parameter in self._parameters.values())
        modules = {module: float(total[rows, _APART].max()) for module, rows in self._rows.items()}
        return {
            "maximum": float(total[:, _APART].max()),
            "rms": math.sqrt(float(total[:, _APART_SQUARES].sum()) / max(values, 1)),
            "by_module": {module: far for module, far in modules.items() if far != 0},
        }

    def _lost(self, total: torch.Tensor) -> dict[str, float]:
        """Each module's share of changed masters whose change, less than half a unit in the last place, has not reached
        the weight; none for modules in FP32, whose weights are the masters."""
        found = {}
        for module, rows in self._rows.items():
            updated, lost = float(total[rows, _UPDATED].sum()), float(total[rows, _LOST].sum())
            if updated and self._computes(module) != "fp32":
                found[module] = _short(lost / updated)
        return found

    def _computes(self, module: str) -> str:
        regions = self._engine.regions
        return regions.dtypes.get(module, "fp32") if regions is not None else self._engine.compute

    def _dtype(self, module: str) -> torch.dtype:
        """The dtype in which the gradients of the module's weights are computed."""
        compute, regions = self._computes(module), self._engine.regions
        return DTYPES[regions.ambient_of(module) if compute == "fp8" and regions is not None else compute]

    def _rounded(self, weights: torch.Tensor, module: str) -> torch.Tensor:
        """(n,) weights, a sample of the masters, rounded as the module computes with them."""
        if self._computes(module) == "fp8":  # for all but the smallest, rounding does not depend on the scale
            return rounded(weights, -1, FORMATS["e4m3"], "row")
        return weights.to(self._dtype(module))

    def _compare(self) -> dict[str, Agreement]:
        """Compare whole gradients, module by module, with those of the FP32 pass."""
        engine = self._engine
        agreement: dict[str, Agreement] = {}
        for _, group in groupby(self._parameters.items(), key=lambda item: item[0].rpartition(".")[0]):
            gradients = [(name, tensors.whole_gradient(engine, parameter)) for name, parameter in group]
            whole = [(name, gradient) for name, gradient in gradients if gradient is not None]
            agreement |= compare_gradients(whole, [(name, self._reference[name]) for name, _ in whole])
        return agreement

    def _through_regions(self, batch: Batch) -> dict[str, torch.Tensor]:
        """FP32 gradients of the step's mean loss on the manifest path: the same modules in FP32."""
        engine, regions = self._engine, self._engine.regions
        assert regions is not None
        with regions.in_fp32():
            engine.forward_backward(batch, step=0)
        gradients = {}
        for name, parameter in self._parameters.items():
            gradient = tensors.whole_gradient(engine, parameter)
            if gradient is not None:  # to the host one by one: all of them need not fit on the device
                gradients[name] = gradient.cpu()
        engine.discard_gradients()
        return gradients

    def _through_masters(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The same on the cast path: the module called with the masters in place of its 16-bit parameters."""
        engine, device = self._engine, self._engine.world.device
        masters = {name: tensors.whole_master(engine, p).requires_grad_() for name, p in self._parameters.items()}
        frozen = (
            (name, tensors.whole_weight(engine, p))
            for name, p in engine.model.named_parameters()
            if not p.requires_grad
        )
        weights = {name: weight.float() if weight.is_floating_point() else weight for name, weight in frozen}
        tokens = engine.world.sum(torch.tensor(float(batch.label_tokens), dtype=torch.float64, device=device))

        # through the backward pass too, in which checkpointed blocks run again
        with _reparametrize_module(engine.model, masters | weights, tie_weights=True):
            for inputs, labels in batch.micro_batches(device):
                scored = engine.objective.score(engine.model, inputs, labels)
                (scored.loss / tokens.clamp(min=1).float()).backward()
        gradients = {name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in masters.items()}
        return {name: engine.world.sum(gradient).detach().cpu() for name, gradient in gradients.items()}


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _shortened(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: _short(value) for name, value in figures.items()}


def _ratio(change: torch.Tensor, size: torch.Tensor) -> float:
    return math.sqrt(float(change / size)) if size > 0 else 0.0


def _trimmed(counts: torch.Tensor) -> dict[str, Any]:
    """{lowest exponent, counts by power of two} without empty ends, for exponents from -126 on."""
    numbers = [int(count) for count in counts.tolist()]
    used = [index for index, count in enumerate(numbers) if count]
    if not used:
        return {"lowest": 0, "counts": []}
    return {"lowest": used[0] - 126, "counts": numbers[used[0] : used[-1] + 1]}
