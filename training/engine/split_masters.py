"""`precision.masters: split`: an FP32 master is kept as its BF16 weight and a remainder (precision/split_masters.py).

DeepSpeed's flat FP32 masters stay the keys of the optimizer's state and the owners of gradients, but hold no memory:
they are a single NaN expanded to their size, which reads that bypass this module get and no write can change. The
optimizer joins, updates and splits them piece by piece. While DeepSpeed then copies each master to its weight, the
master *is* the weight. To save, load or set masters they are made whole, at a time when no activations are held.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.adamw import adamw

from config.errors import UserError
from config.optimizers import COUNT, OPTIMIZERS
from precision.split_masters import SPLIT_PIECE, SPLIT_PIECE_ON_A_GPU, joined, remainder_of
from training.distributed import World
from training.engine.masters import local_masters

_AVERAGES = OPTIMIZERS["adamw"].states


class SplitMaster:
    """One flat FP32 master of this rank, split or whole."""

    def __init__(self, flat: torch.Tensor, weight: torch.Tensor) -> None:
        """flat: (n,) FP32, DeepSpeed's. weight: (n,) BF16, DeepSpeed's view of the values that modules compute with."""
        self._flat, self._weight = flat, weight
        self.tensors: tuple[torch.Tensor, ...] = ()
        """Tensors held in addition to the weight: the remainder and its upper ties; none while the master is whole."""

    @property
    def whole(self) -> bool:
        return not self.tensors

    def values(self, start: int, length: int) -> torch.Tensor:
        """(length,) FP32: a view of a whole master, a copy of a split one."""
        if self.whole:
            return self._flat.detach()[start : start + length]
        remainder, uppers = self.tensors
        first = start // 8 * 8
        end = start + length
        found = joined(self._weight[first:end], remainder[first:end], uppers[first // 8 : -(-end // 8)])
        return found[start - first :]

    def pieces(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """A split master piece by piece: a slice and its (k,) FP32 values, which are written back once changed."""
        for where in self._slices():
            piece = self.values(where.start, where.stop - where.start)
            yield where, piece
            self._take(where, piece)

    def split(self) -> int:
        """Free the FP32 memory; returns how many weights are not their rounded masters: unless 0, nothing is split."""
        flat, weight, count = self._flat.detach(), self._weight, 0
        for where in self._slices():
            rounded = flat[where].to(weight.dtype)
            count += int(((weight[where] != rounded) & ~(weight[where].isnan() & rounded.isnan())).sum())
        if count:
            return count
        remainder = torch.empty(len(weight), dtype=torch.int16, device=weight.device)
        self.tensors = remainder, torch.empty(-(-len(weight) // 8), dtype=torch.uint8, device=weight.device)
        for where in self._slices():
            self._take(where, flat[where])
        self.hide()
        return 0

    def make_whole(self) -> None:
        """Give DeepSpeed's master its memory and values back; nothing is held in addition to it then."""
        if not self.whole:
            self._flat.data = self.values(0, len(self._weight))
            self.tensors = ()

    def show_weight(self) -> None:
        """Point the master at the weight, for DeepSpeed's copy from one to the other."""
        self._flat.data = self._weight

    def hide(self) -> None:
        """Turn the master into a single NaN expanded to its size."""
        self._flat.data = torch.full((1,), torch.nan, device=self._weight.device).expand(len(self._weight))

    def _slices(self) -> Iterator[slice]:
        size = SPLIT_PIECE if self._weight.device.type == "cpu" else SPLIT_PIECE_ON_A_GPU
        for start in range(0, len(self._weight), size):
            yield slice(start, min(start + size, len(self._weight)))

    def _take(self, where: slice, master: torch.Tensor) -> None:
        remainder, uppers = self.tensors
        weight = self._weight[where].copy_(master)
        remainder[where], uppers[where.start // 8 : -(-where.stop // 8)] = remainder_of(master, weight)


class SplitAdamW(torch.optim.AdamW):
    """torch's fused AdamW on split masters, bit for bit: piece by piece, each from a multiple of 64 bytes on, so that
    no further value falls into the tail of a vectorised loop."""

    def __init__(self, groups: list[dict[str, Any]], options: dict[str, Any]) -> None:
        super().__init__(groups, fused=True, **options)
        self.splits: dict[torch.Tensor, SplitMaster] = {}
        """Maps a flat master to how it is held; whole masters are left to torch."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every flat master that has a gradient."""
        given = [(group, flat) for group in self.param_groups for flat in group["params"] if flat.grad is not None]
        if not self.splits or any(self.splits[flat].whole for _, flat in given):
            super().step()
            return
        for group, flat in given:
            self._update(flat, self.splits[flat], group)

    def _update(self, flat: torch.Tensor, split: SplitMaster, group: dict[str, Any]) -> None:
        gradient, state = flat.grad, self.state[flat]
        assert gradient is not None
        if not state:  # as torch's own first step makes it
            state[COUNT] = torch.zeros((), dtype=torch.float32, device=flat.device)
            state |= {name: torch.zeros_like(gradient) for name in _AVERAGES}
        first, second = (state[name] for name in _AVERAGES)
        beta1, beta2 = group["betas"]
        settings = {key: group[key] for key in ("lr", "weight_decay", "eps")}
        settings |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
        for where, piece in split.pieces():
            averages = [first[where]], [second[where]], list[torch.Tensor]()
            adamw([piece], [gradient[where]], *averages, [state[COUNT].clone()], fused=True, foreach=False, **settings)
        state[COUNT] += 1
        split.show_weight()


class SplitMasters:
    """All split masters of one engine. Making them whole and splitting them are collectives."""

    def __init__(self, engine: Any, *, stage: int, world: World) -> None:
        """engine: DeepSpeed's, with SplitAdamW, from ZeRO-1 on. Splits the masters."""
        self._parameters = list(engine.module.parameters())
        self._world, self._depth = world, 0
        flats = local_masters(engine.optimizer)
        pairs = zip(flats, _weights(engine.optimizer, stage, world.rank), strict=True)
        self.of = engine.basic_optimizer.splits = {flat: SplitMaster(flat, weight) for flat, weight in pairs}
        self._split()

    @contextmanager
    def made_whole(self) -> Iterator[None]:
        """Context in which masters are DeepSpeed's FP32 tensors and may be written. After an error they stay so."""
        if not self._depth:
            for split in self.of.values():
                split.make_whole()
            self._link()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if not self._depth:
            self._split()

    def hide(self) -> None:
        """Hide the masters after a step, in which they were pointed at weights."""
        for split in self.of.values():
            if not split.whole:
                split.hide()

    def _split(self) -> None:
        odd = sum(split.split() for split in self.of.values())
        problem = f"precision.masters = split: {odd:,} weights differ from their rounded FP32 masters"
        self._world.raise_first(problem if odd else None, UserError)
        self._link()

    def _link(self) -> None:
        """Point DeepSpeed's views of parts of the masters at what these are now; ZeRO-1 and 2 have such views."""
        flats = list(self.of)
        for mapping in filter(None, (getattr(p, "_hp_mapping", None) for p in self._parameters)):
            address = mapping.hp_fragment_address
            mapping.hp_fragment = flats[mapping.param_group_index].detach().narrow(0, address.start, address.numel)


def _weights(optimizer: Any, stage: int, rank: int) -> list[torch.Tensor]:
    """DeepSpeed's BF16 weights for this rank's masters, in their order: at ZeRO-1 and 2 every rank has all weights."""
    if stage == 3:
        return list(optimizer.fp16_partitioned_groups_flat)
    name = "bf16_partitioned_groups" if stage == 1 else "parallel_partitioned_bit16_groups"
    return [partitions[rank] for partitions in getattr(optimizer, name)]
