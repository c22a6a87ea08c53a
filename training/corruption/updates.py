"""Recomputation of part of each optimizer update in FP64.

Masters and moments may be sharded, so that no other rank can check them. Instead a copy of a random slice is kept after
each update, and the next update of it is computed from that copy and the reduced gradient. A difference beyond FP32
rounding means that a bit flipped since, or that the update was wrong; the count of such values rides on the gather of
the next step's health.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from config.schema import OptimizerSection
from precision.corruption import Flip
from training.engine import Engine
from training.engine.optimizer import IMPLEMENTATIONS
from training.engine.optimizers.rule import UpdateInputs
from training.engine.tensors import Shard, first_of_slice, local_gradient, own_shards, states_of, trainable_parameters


@dataclass(frozen=True)
class Slice:
    """Values `at` to `at + length` of this rank's part of one parameter."""

    name: str
    shard: Shard
    at: int
    length: int
    kept: list[torch.Tensor]
    """Copies of its master and its state, FP32."""


@dataclass(frozen=True)
class Compared:
    """A slice, compared after its update."""

    slice: Slice
    given: UpdateInputs
    found: list[torch.Tensor]
    """Master and state as the optimizer left them."""
    excess: torch.Tensor
    """(length,) float64: largest error of master and state, in multiples of the rounding bound; wrong above 1."""


class UpdateCheck:
    """Checks one rank's updates. No method but `examine` is a collective."""

    def __init__(
        self, engine: Engine, section: OptimizerSection, *, values: int, seed: int, of_each: bool = False
    ) -> None:
        """values: length of the slice. seed: selects the slices, independent of training's random numbers. of_each: a
        slice of every parameter with an elementwise rule, instead of one slice overall."""
        self._engine, self._section, self._values, self._of_each = engine, section, values, of_each
        self._parameters = trainable_parameters(engine)
        self._draw = random.Random(f"{seed} {engine.world.rank}")
        self._shards: list[tuple[str, Shard]] | None = None
        self._slices: list[Slice] | None = None
        self._gradients: list[torch.Tensor | None] = []
        self.compared: list[Compared] = []

    def forget(self) -> None:
        """Drop all copies, after a checkpoint was loaded."""
        self._shards, self._slices, self._gradients, self.compared = None, None, [], []

    def wrong(self) -> torch.Tensor:
        """() float64: number of wrong values in the last update."""
        total = torch.zeros((), dtype=torch.float64, device=self._engine.world.device)
        for done in self.compared:
            count = (done.excess > 1).sum().double()
            total = total + (count if count.device == total.device else count.to(total.device))
        return total

    def changed(self) -> int:
        """Number of slices whose master or state is not what the last update left; each is looked at once."""
        compared, self.compared = self.compared, []
        pairs = [zip(done.found, self._held(done.slice), strict=True) for done in compared]
        moved = [torch.stack([(was != now).any() for was, now in pair]).any() for pair in pairs]
        return int(torch.stack(moved).sum()) if moved else 0

    @torch.no_grad()
    def before_update(self) -> None:
        """Copy the slice's reduced gradient, which the update consumes."""
        self.compared = []
        self._slices = self._keep() if self._slices is None else self._slices
        self._gradients = [self._gradient_of(own) for own in self._slices]

    @torch.no_grad()
    def after_update(self, *, norm: float, scale: float, lr: float, step: int) -> None:
        """Recompute the slice, and copy another one. norm: of the unscaled gradient. step: this update's number."""
        clipping = self._engine.clipping
        divided = scale * (max(1.0, (norm + 1e-6) / clipping) if clipping else 1.0)
        for own, gradient in zip(self._slices or (), self._gradients, strict=True):
            if gradient is None:
                continue
            group = self._engine.group_of[id(self._parameters[own.name])]
            settings: dict[str, Any] = {"lr": lr * group["lr_factor"], "section": self._section, "step": step}
            settings |= {key: group[key] for key in ("weight_decay", "matrix")}
            master, *states = own.kept
            given = UpdateInputs(master, gradient.double() / divided, states, **settings)
            found = self._held(own)
            self.compared.append(Compared(own, given, found, excess(given, found).amax(0)))
        self._slices, self._gradients = None if self._of_each else self._keep(), []

    def examine(self) -> list[Flip]:
        """The first wrong value of each rank, with its bit if a single flipped bit explains it. A collective."""
        mine: Flip | None = None
        done = next((done for done in self.compared if bool((done.excess > 1).any())), None)
        if done is not None:
            index = int((done.excess > 1).nonzero()[0])
            kind, bits = self._explain(done, index)
            where = first_of_slice(self._engine, self._parameters[done.slice.name])
            where += done.slice.shard.start + done.slice.at + index
            mine = Flip("update", (self._engine.world.rank,), done.slice.name, kind, where, bits)
        return [flip for flip in self._engine.world.gather_objects(mine) if flip is not None]

    def _keep(self) -> list[Slice]:
        """Copies of a slice that begins anywhere in this rank's concatenated masters and wraps around at their end; in
        pieces if it spans several parameters."""
        if self._shards is None:
            whole = {id(p) for p in self._parameters.values() if self._engine.group_of[id(p)]["matrix"]}
            whole = whole if self._section.name == "muon" else set()
            self._shards = [(name, shard) for name, p, shard in own_shards(self._engine) if id(p) not in whole]
        if self._of_each:
            return [self._slice_of(name, shard) for name, shard in self._shards]
        lengths = [shard.length for _, shard in self._shards]
        left = min(self._values, sum(lengths))
        at = self._draw.randrange(sum(lengths)) if left else 0
        found: list[Slice] = []
        row = 0
        while left:
            (name, shard), length = self._shards[row % len(lengths)], lengths[row % len(lengths)]
            if at < length:
                found.append(self._copied(Slice(name, shard, at, min(left, length - at), [])))
                left -= found[-1].length
            at, row = max(at - length, 0), row + 1
        return found

    def _slice_of(self, name: str, shard: Shard) -> Slice:
        """A slice of one parameter; in one case of four its end."""
        length = min(self._values, shard.length)
        at = self._draw.randrange(shard.length - length + 1) if self._draw.random() < 0.75 else shard.length - length
        return self._copied(Slice(name, shard, at, length, []))

    def _copied(self, own: Slice) -> Slice:
        return replace(own, kept=self._held(own))

    def _gradient_of(self, own: Slice) -> torch.Tensor | None:
        whole = local_gradient(self._parameters[own.name], own.shard, self._engine.stage)
        if whole is None:
            return None
        gradient = whole[own.at : own.at + own.length].to(torch.float32, copy=True)
        device = own.shard.flat.device
        return gradient if gradient.device == device else gradient.to(device)  # of an offloaded master

    def _held(self, own: Slice) -> list[torch.Tensor]:
        """Copies of the slice's master and state; zeros for state that does not exist yet."""
        master = own.shard.master(own.at, own.length).clone()
        found, tensors = [master], own.shard.states(self._engine)
        for kind in states_of(self._engine, self._parameters[own.name]):
            state = tensors.get(kind)
            found.append(torch.zeros_like(master) if state is None else state[own.at : own.at + own.length].clone())
        return found

    def _explain(self, done: Compared, index: int) -> tuple[str, tuple[int, ...]]:
        """The tensor and the bit that must flip in the copies to explain the observed values."""
        kinds = ("master", *states_of(self._engine, self._parameters[done.slice.name]))
        found = [values[index].expand(32) for values in done.found]
        kept = [values[index].expand(32) for values in done.slice.kept]
        masks = torch.tensor([1 << bit if bit < 31 else -(1 << 31) for bit in range(32)], dtype=torch.int32)
        masks = masks.to(kept[0].device)
        for row, kind in enumerate(kinds):
            tried = [values.contiguous() for values in kept]
            tried[row] = (tried[row].view(torch.int32) ^ masks).view(torch.float32)
            gradient = done.given.gradient[index].expand(32)
            flipped = replace(done.given, master=tried[0], gradient=gradient, states=tried[1:])
            explained = excess(flipped, found).amax(0) <= 1
            if bool(explained.any()):
                return kind, (int(explained.nonzero()[0]),)
        apart = excess(done.given, done.found) > 1
        return next(kind for kind, wrong in zip(kinds, apart, strict=True) if bool(wrong[index])), ()


def excess(given: UpdateInputs, found: list[torch.Tensor]) -> torch.Tensor:
    """(1 + states, length) errors in multiples of the rounding bound; inf for a non-finite value whose reference is
    finite. The bound is at least FP32's smallest normal number, which exceeds all roundings below it."""
    expected, slack = IMPLEMENTATIONS[given.section.name].after(given)
    rows = []
    for a, b, c in zip(found, expected, slack, strict=True):
        apart = (a.double() - b).abs() / c.clamp_min(torch.finfo(torch.float32).tiny)
        rows.append(torch.where(a.isfinite() | b.isfinite(), apart.nan_to_num(torch.inf), 0.0))
    return torch.stack(rows)
