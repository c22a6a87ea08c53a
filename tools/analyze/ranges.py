"""Magnitudes of every region's tensors: exponent histograms of activations, gradients, weights and weight gradients.

Activations are a region's non-weight operands and the results of its matmuls, observed below autograd and autocast as
in `precision.observe`, so that queries, keys and values of a fused attention kernel are measured. Gradients are those
of its outputs and inputs, unscaled if the loss is; an input read by several modules (q, k and v projections) has one,
their sum, which counts for each. Modules inside an attention module count for it too. Weight gradients are those of one
micro-batch on one rank, as computed by the backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from precision.findings import tensors_of
from precision.manifest import RegionKind
from precision.observe import Observation

KINDS = ("activations", "gradients", "weights", "weight_gradients")
LOWEST_EXPONENT = -150
"""Below the smallest FP32 subnormal: no FP32 value lies under it."""
HIGHEST_EXPONENT = 128
"""Above the largest FP32 number."""
_BINS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
_ZEROS, _NONFINITE = _BINS, _BINS + 1
_PIECE = 1 << 18
"""Number of values counted at a time: the histogram needs an 8-byte index for each."""


@dataclass(frozen=True)
class Spread:
    """The magnitudes of one region and kind."""

    lowest: int
    """Exponent of the first count."""
    counts: tuple[int, ...]
    """counts[i] values x with 2^(lowest + i) <= |x| < 2^(lowest + i + 1); no empty ends."""
    zeros: int
    nonfinite: int
    maximum: float
    """Largest finite magnitude; 0 if there is none."""

    @property
    def values(self) -> int:
        """Number of finite non-zero values."""
        return sum(self.counts)


def exponent_histogram(values: torch.Tensor) -> torch.Tensor:
    """(bins + 2,) int64: counts by power of two from LOWEST_EXPONENT up, then of zeros and of non-finite values. The
    values must be within FP32's range."""
    flat = values.detach().float().abs().reshape(-1)
    index = flat.frexp().exponent - 1 - LOWEST_EXPONENT  # frexp's mantissa is in [0.5, 1)
    index = torch.where(flat == 0, _ZEROS, torch.where(flat.isfinite(), index, _NONFINITE)).long()
    counts = torch.zeros(_BINS + 2, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, index, torch.ones_like(index))


class Ranges:
    """Histograms of every region and kind, on the device, without synchronization until `spreads`.

    `counts`: (regions, kinds, bins + 2) int64, the last two for zeros and non-finite values. `maxima`: (regions, kinds)
    float64. Both have the same shape on every rank and can be reduced, by a sum and by a maximum.
    """

    def __init__(self, names: Iterable[str], device: torch.device) -> None:
        self._rows = {name: row for row, name in enumerate(names)}
        shape = (len(self._rows), len(KINDS))
        self.counts = torch.zeros(*shape, _BINS + 2, dtype=torch.int64, device=device)
        self.maxima = torch.zeros(shape, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, name: str, kind: str, values: torch.Tensor) -> None:
        """Count a tensor of any shape and floating dtype; other dtypes are ignored."""
        if not values.is_floating_point() or not values.numel():
            return
        where = self._rows[name], KINDS.index(kind)
        for piece in values.detach().reshape(-1).split(_PIECE):
            self.counts[where] += exponent_histogram(piece)
            largest = torch.where(piece.isfinite(), piece, 0.0).abs().amax().double()
            self.maxima[where] = torch.maximum(self.maxima[where], largest)

    def add_all(self, other: Ranges) -> None:
        """Count what another measurement of the same regions has counted, too."""
        self.counts += other.counts
        self.maxima = torch.maximum(self.maxima, other.maxima)

    def spreads(self) -> dict[str, dict[str, Spread]]:
        """Region to kind to its spread; kinds without a value are left out."""
        counts, maxima = self.counts.tolist(), self.maxima.tolist()
        found: dict[str, dict[str, Spread]] = {}
        for name, row in self._rows.items():
            found[name] = {}
            for column, kind in enumerate(KINDS):
                numbers = counts[row][column]
                used = [index for index in range(_BINS) if numbers[index]]
                if any(numbers):
                    low, high = (used[0], used[-1] + 1) if used else (0, 0)
                    trimmed = tuple(numbers[low:high])
                    rest = numbers[_ZEROS], numbers[_NONFINITE], maxima[row][column]
                    found[name][kind] = Spread(LOWEST_EXPONENT + low, trimmed, *rest)
        return found


class OperandMeter(Observation):
    """Context manager around forward passes that measures activations, weights and matmul FLOPs of every region.

    Use it without gradients: a recomputation by activation checkpointing would be counted again. `region_flops`: module
    name to forward FLOPs, as in `precision.observe`, for regions and any other module with matmuls.
    """

    def __init__(self, model: torch.nn.Module, kinds: Mapping[str, RegionKind], ranges: Ranges) -> None:
        super().__init__(model)
        self.region_flops: dict[str, int] = defaultdict(int)
        self._ranges, self._kinds = ranges, kinds
        self._regions = {name: module for name, module in model.named_modules() if name in kinds}
        self._weights_counted: set[str] = set()

    def __enter__(self) -> OperandMeter:
        super().__enter__()
        for name, module in self._regions.items():
            # Before the forward pass, when ZeRO-3 has gathered the weights and not yet released them.
            self._exit.callback(module.register_forward_pre_hook(partial(self._count_weights, name)).remove)
            if self._kinds[name] == "norm":
                self._exit.callback(module.register_forward_hook(partial(self._norm, name)).remove)
        return self

    def _count_weights(self, name: str, module: torch.nn.Module, args: Any) -> None:
        if name not in self._weights_counted:
            self._weights_counted.add(name)
            for weight in module.parameters(recurse=False):
                self._ranges.add(name, "weights", weight)

    def _norm(self, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_of((args, output)):
            self._ranges.add(name, "activations", tensor)

    def _see(self, func: Any, name: str, args: tuple, output: Any) -> None:
        before = sum(self.flops.values())
        super()._see(func, name, args, output)
        multiplied = sum(self.flops.values()) - before
        if not multiplied:
            return
        where = self._running[-1]
        self.region_flops[where] += multiplied
        if where in self._regions:
            own = {weight.untyped_storage().data_ptr() for weight in self._regions[where].parameters(recurse=False)}
            # Arguments after the third are masks; results after a fused attention kernel's first are its bookkeeping.
            for tensor in (*tensors_of(args[:3]), next(tensors_of(output))):
                if tensor.untyped_storage().data_ptr() not in own:
                    self._ranges.add(where, "activations", tensor)


@contextmanager
def gradients_counted(model: torch.nn.Module, kinds: Mapping[str, RegionKind], ranges: Ranges) -> Iterator[None]:
    """Context manager around forward and backward passes that counts gradients and weight gradients of every region.

    Activation checkpointing counts no gradient twice: only tensors on the backward path have one.
    """

    def count(names: list[str], kind: str, gradient: torch.Tensor) -> None:
        for name in names:
            ranges.add(name, kind, gradient)

    def watch(names: list[str], module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        for tensor in tensors_of((args, kwargs, output)):
            if tensor.requires_grad and tensor.is_floating_point():
                tensor.register_hook(partial(count, names, "gradients"))

    readers: dict[torch.nn.Parameter, list[str]] = defaultdict(list)
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name not in kinds:
                continue
            attention = [around for around in kinds if kinds[around] == "attention" and name.startswith(f"{around}.")]
            stack.enter_context(module.register_forward_hook(partial(watch, [name, *attention]), with_kwargs=True))
            for weight in module.parameters(recurse=False):
                readers[weight].append(name)
        for weight, names in readers.items():
            if weight.requires_grad:
                stack.enter_context(weight.register_hook(partial(count, names, "weight_gradients")))
        yield
