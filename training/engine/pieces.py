"""Which values of an optimizer's flat tensors belong to which parameter, for optimizers that look at whole ones.

ZeRO gives an optimizer flat tensors of many parameters, which may be cut anywhere. Where a rule takes the norm or the
mean of a whole parameter, each rank computes its piece's share of it, and the shares are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from config.optimizers import EXCHANGED_VALUES
from training.engine.engine import Engine
from training.engine.tensors import flat_masters, shape_of, shard_of, trainable_parameters

Rule = Callable[[torch.Tensor], torch.Tensor]
"""A whole matrix to what replaces it."""


@dataclass(frozen=True)
class Piece:
    """This rank's values of one parameter in a flat tensor."""

    row: int
    """Number of the parameter."""
    at: int
    """Of its first value in the flat tensor."""
    start: int
    """Of its first value in the parameter."""
    length: int
    numel: int
    """Values of the whole parameter, on all ranks."""

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """(length,) view of the piece in a tensor laid out as the flat master is."""
        return flat.view(-1)[self.at : self.at + self.length]


class Pieces:
    """Of parameters that are whole on every rank, as torch gives them to an optimizer."""

    def of(self, flat: torch.Tensor) -> list[Piece]:
        """The pieces in a flat tensor that the optimizer updates."""
        return [Piece(0, 0, 0, flat.numel(), flat.numel())]

    def sums(self, parts: Iterable[tuple[Piece, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
        """(parameters,) sums over all ranks of the scalars that this rank's pieces give, FP64, on the device of `like`.

        A collective where the parameters are shared out: ranks call it equally often, also for a flat tensor in which
        they have no piece.
        """
        total = torch.zeros(self._parameters, dtype=torch.float64, device=like.device)
        for piece, value in parts:
            total[piece.row] += value
        return total

    def replace_matrices(self, flat: torch.Tensor, values: torch.Tensor, rule: Rule) -> torch.Tensor:
        """`values`, laid out as `flat` is, in which `rule` has replaced every whole matrix.

        A collective where the parameters are shared out, as `sums` is. Each matrix is computed once, by one rank, whose
        result the others get.
        """
        return rule(values)

    _parameters = 1


class ShardedPieces(Pieces):
    """Of parameters that ZeRO cut up and shared out."""

    def __init__(self, engine: Engine) -> None:
        """Reads shapes and places; no collective."""
        self._world = engine.world
        self._flats = [id(flat) for flat in flat_masters(engine)]
        self._of: dict[int, list[Piece]] = {flat: [] for flat in self._flats}
        parameters = trainable_parameters(engine).values()
        self._parameters = len(parameters)
        self._shapes = [shape_of(parameter) for parameter in parameters]
        for row, parameter in enumerate(parameters):
            shard = shard_of(engine, parameter)
            if shard is not None:
                piece = Piece(row, shard.at, shard.start, shard.length, self._shapes[row].numel())
                self._of[id(shard.flat)].append(piece)

    def of(self, flat: torch.Tensor) -> list[Piece]:
        return self._of[id(flat)]

    def sums(self, parts: Iterable[tuple[Piece, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
        # offloaded values are in host memory, and collectives on the device
        return self._world.sum(super().sums(parts, like).to(self._world.device)).to(like.device)

    def replace_matrices(self, flat: torch.Tensor, values: torch.Tensor, rule: Rule) -> torch.Tensor:
        for owners in self._batches[id(flat)]:
            self._exchange(flat, values, owners, rule)
        return values

    @cached_property
    def _everywhere(self) -> dict[int, list[list[Piece]]]:
        """Flat tensor to each rank's pieces in its own part of it. A collective."""
        by_rank = self._world.gather_objects([self._of[flat] for flat in self._flats])
        return {flat: [pieces[index] for pieces in by_rank] for index, flat in enumerate(self._flats)}

    @cached_property
    def _batches(self) -> dict[int, list[dict[int, int]]]:
        """Flat tensor to batches of its parameters, each by number, with the rank that computes it. A collective."""
        return {
            flat: list(self._shared_out({piece.row for piece in chain(*ranks)}))
            for flat, ranks in self._everywhere.items()
        }

    def _shared_out(self, rows: set[int]) -> Iterator[dict[int, int]]:
        """The largest first, each to the rank with the least work; the same on all ranks."""
        ranks = self._world.world_size
        work, owners, size = [0] * ranks, dict[int, int](), 0
        for row in sorted(rows, key=lambda row: (-self._shapes[row].numel(), row)):
            numel = self._shapes[row].numel()
            if owners and size + numel > EXCHANGED_VALUES * ranks:
                yield owners
                owners, size = {}, 0
            owners[row] = work.index(min(work))
            work[owners[row]] += numel * min(self._shapes[row], default=1)
            size += numel
        if owners:
            yield owners

    def _exchange(self, flat: torch.Tensor, values: torch.Tensor, owners: dict[int, int], rule: Rule) -> None:
        """Send pieces to the ranks that own their matrices, and get them back as `rule` leaves them."""
        everywhere, device = self._everywhere[id(flat)], self._world.device
        mine = [[piece for piece in self.of(flat) if owners.get(piece.row) == rank] for rank in range(len(everywhere))]
        theirs = [[piece for piece in pieces if owners.get(piece.row) == self._world.rank] for pieces in everywhere]
        sent, received = ([sum(piece.length for piece in pieces) for pieces in each] for each in (mine, theirs))
        parts = [piece.of(values) for piece in chain(*mine)]
        gathered = self._world.exchange(_joined(parts, values).to(device), sent, received)
        wholes = {
            row: gathered.new_empty(self._shapes[row]) for row, rank in owners.items() if rank == self._world.rank
        }
        places = [wholes[piece.row].view(-1)[piece.start : piece.start + piece.length] for piece in chain(*theirs)]
        _spread(gathered, places)
        for whole in wholes.values():
            whole.copy_(rule(whole))
        _spread(self._world.exchange(_joined(places, gathered), received, sent).to(values.device), parts)


def _joined(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts) if parts else like.new_empty(0)


def _spread(values: torch.Tensor, places: list[torch.Tensor]) -> None:
    """Copy consecutive values to views."""
    for place, part in zip(places, values.split([len(place) for place in places]), strict=True):
        place.copy_(part)


class FlatOptimizer(torch.optim.Optimizer):
    """An optimizer that is given flat tensors, one after the other."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every flat tensor that has a gradient."""
        for group in self.param_groups:
            for flat in group["params"]:
                if flat.grad is not None:
                    self.update_flat(flat, self.state[flat], group)

    def update_flat(self, flat: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one of them in place. state: empty before the first update. group: its settings, `lr` of this step."""
        raise NotImplementedError


class WholeParameterOptimizer(FlatOptimizer):
    """One whose rule looks at whole parameters, so that above ZeRO-0 a step is a collective."""

    def __init__(self, groups: list[dict[str, Any]], options: dict[str, Any]) -> None:
        super().__init__(groups, options)
        self.told: Pieces | None = None

    @property
    def pieces(self) -> Pieces:
        """Which values belong to which parameter. Raises RuntimeError before `tell_pieces`: a guess would be wrong."""
        if self.told is None:
            raise RuntimeError("the optimizer was not told where parameters begin and end: call tell_pieces first")
        return self.told


def tell_pieces(engine: Engine) -> None:
    """Tell the optimizer, where it asks, which values belong to which parameter. Before the first update."""
    optimizer = engine.deepspeed.basic_optimizer
    if isinstance(optimizer, WholeParameterOptimizer):
        optimizer.told = ShardedPieces(engine) if engine.stage > 0 else Pieces()
