"""The oracle's own updates, and how far they have moved the weights, compared with a run's masters.

Parameters and gradients are FP64. So are the moments while their parameter is updated; between updates they are FP32,
and the initial weights are on disk, so at most 24 bytes per parameter are held.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from config.schema import OptimizerSection
from precision.statistics import in_fp64
from precision.tolerance import unit_roundoff
from tools.parity.oracle.comparison import Comparison, relative_difference
from tools.parity.oracle.optimizers import optimizer_of
from tools.parity.plain import Apart

DISTANCE, DIRECTION = "distance moved", "direction moved"
_NOTHING = 1e-7
"""Share of the whole gradient's norm below which a parameter's gradient is FP32 rounding."""


class Movement:
    """The updates of a model's trained parameters, from its FP32 weights at construction."""

    def __init__(self, model: Any, section: OptimizerSection) -> None:
        self._made_of = model, section
        self._optimizer = optimizer_of(model, section)
        self._trained = {name: item for name, item in model.named_parameters() if item.requires_grad}
        self._folder = tempfile.TemporaryDirectory(prefix="oracle-")
        self._start = Path(self._folder.name) / "start.pt"
        torch.save({name: item.detach() for name, item in self._trained.items()}, self._start)
        self._weight = dict.fromkeys(self._trained, 0.0)
        """The largest share of the whole gradient's norm that a parameter's had in any update."""
        self._updates = 0

    def update(self, rate: float, *, shares: Mapping[str, float], factor: float) -> None:
        """One update at a learning rate. Parameter by parameter, the largest last, each gradient freed at once.

        shares: of the whole gradient's norm, by parameter. factor: applied to gradients by clipping.
        """
        gradients = {name: self._trained[name].grad for name in shares}
        self._optimizer.zero_grad()
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        for name in sorted(gradients, key=lambda name: self._trained[name].numel()):
            self._weight[name] = max(self._weight[name], shares[name])
            parameter, gradient = self._trained[name], gradients.pop(name)
            assert gradient is not None
            parameter.grad = gradient.mul_(factor)
            self._hold_moments(parameter, torch.float64)
            self._optimizer.step()
            self._hold_moments(parameter, torch.float32)
            parameter.grad = None
        self._updates += 1

    @torch.no_grad()
    def begin_again(self) -> None:
        """Go back to the initial weights, each off by about FP32's unit roundoff. `compare` no longer applies."""
        draw = torch.Generator().manual_seed(0)
        for name, value in torch.load(self._start).items():
            noise = torch.randn(value.shape, generator=draw, dtype=value.dtype)
            self._trained[name].copy_(value * (1 + unit_roundoff(torch.float32) * noise))
        self._optimizer = optimizer_of(*self._made_of)

    def _hold_moments(self, parameter: torch.Tensor, dtype: torch.dtype) -> None:
        state = self._optimizer.state[parameter]
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[key] = value.to(dtype)

    @torch.no_grad()
    def compare(self, saved: Mapping[str, Any], compared: Mapping[str, Comparison], where: str) -> None:
        """Compare a checkpoint's masters with the oracle's, relative to how far they have moved from the start.

        An FP32 master is rounded once per update, by at most 2^-24 of itself, which is no difference. At a small rate
        that is much of a norm's movement, and the same for all of its ones. Parameters whose gradient is only rounding,
        such as a key bias, are left out: Adam follows its sign all the same.
        """
        start, whole, rounded = torch.load(self._start, mmap=True), Apart(), 0.0
        for name, parameter in self._trained.items():
            if 0 < self._weight[name] < _NOTHING:
                continue
            own, size = Apart(), 0.0
            for now, before, master in in_fp64(parameter, start[name], saved[name].read()):
                for apart in (own, whole):
                    apart.add(master - before, now - before)
                size += float(master.square().sum())
                rounded += float((now.float() - now).square().sum())
            if "masters" in compared:
                distance = max(own.off**0.5 - self._updates * 2.0**-24 * size**0.5, 0.0)
                compared["masters"].add(distance / own.size**0.5 if distance else 0.0, f"{name}, {where}")
        rounding = self._updates * (rounded / whole.size) ** 0.5 if whole.size else 0.0
        distance = relative_difference(whole.length, whole.size**0.5)
        compared[DISTANCE].add(distance - min(rounding, distance), where)
        turned = 1.0 - whole.cosine
        compared[DIRECTION].add(turned - min(rounding**2 / 2, turned), where)
