"""Whole parameters for an optimizer of ZeRO's flat tensors: each rank's pieces, and reassembled matrices."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import ceil

import torch

from config.optimizers import EXCHANGED_VALUES
from modeling.tensor_parallel import cut
from training.engine.engine import Engine
from training.engine.flat_optimizer import Piece, Pieces, Rule, WholeParameterOptimizer
from training.engine.masters import local_masters
from training.engine.tensors import first_of_slice, shard_of, trainable_parameters, whole_shape_of


@dataclass(frozen=True)
class Batch:
    """Matrices of one flat tensor that are exchanged at once."""

    shapes: dict[int, torch.Size]
    """Shapes of the matrices that this rank computes, by number."""
    mine: list[list[Piece]]
    """This rank's pieces, by the rank that computes their matrices. A piece's `row` is its matrix's number here."""
    theirs: list[list[Piece]]
    """The pieces of the matrices that this rank computes, by the rank that has them."""


class ShardedPieces(Pieces):
    """The pieces of parameters that ZeRO partitions, and of experts that ranks share: consecutive rows, so that a piece
    of a slice is one of the whole parameter."""

    def __init__(self, engine: Engine) -> None:
        """Reads shapes and places; no collective."""
        self._world = engine.world
        self._flats = [id(flat) for flat in local_masters(engine.deepspeed.optimizer)]
        self._of: dict[int, list[Piece]] = {flat: [] for flat in self._flats}
        parameters = trainable_parameters(engine).values()
        self._parameters = len(parameters)
        self._matrices: list[range] = []
        """The numbers of each parameter's matrices, counted over all parameters."""
        self._shapes: list[torch.Size] = []
        """Shapes of the matrices, by number."""
        self._stay: list[bool] = []
        """Whether a matrix stays on a rank that has values of it: every rank has equally many whole experts."""
        for row, parameter in enumerate(parameters):
            shape, shard, first = whole_shape_of(parameter), shard_of(engine, parameter), len(self._shapes)
            self._shapes += [torch.Size(shape[1:])] * shape[0] if len(shape) == 3 else [shape]
            self._matrices.append(range(first, len(self._shapes)))
            self._stay += [cut(parameter) is not None] * len(self._matrices[row])
            if shard is not None:
                start = first_of_slice(engine, parameter) + shard.start
                self._of[id(shard.flat)].append(Piece(row, shard.at, start, shard.length, shape.numel()))

    def of(self, flat: torch.Tensor) -> list[Piece]:
        return self._of[id(flat)]

    def sums(self, parts: Iterable[tuple[Piece, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
        # offloaded values are in host memory, and collectives on the device
        return self._world.sum(super().sums(parts, like).to(self._world.device)).to(like.device)

    def replace_matrices(self, flat: torch.Tensor, values: torch.Tensor, rule: Rule) -> torch.Tensor:
        for batch in self._batches[id(flat)]:
            self._exchange(batch, values, rule)
        return values

    def _by_matrix(self, piece: Piece) -> Iterator[Piece]:
        """The piece cut at the bounds of matrices: each part with its matrix's number and its place in the matrix."""
        matrices = self._matrices[piece.row]
        size = piece.numel // len(matrices)
        for index in range(piece.start // size, ceil((piece.start + piece.length) / size)):
            start = max(piece.start, index * size)
            length = min(piece.start + piece.length, (index + 1) * size) - start
            yield Piece(matrices[index], piece.at + start - piece.start, start - index * size, length, size)

    @cached_property
    def _batches(self) -> dict[int, list[Batch]]:
        """Maps a flat tensor to its matrices in batches. A collective."""
        mine = [[part for piece in self._of[flat] for part in self._by_matrix(piece)] for flat in self._flats]
        by_rank = self._world.gather_objects(mine)
        return {flat: self._shared_out([of[index] for of in by_rank]) for index, flat in enumerate(self._flats)}

    def _shared_out(self, everywhere: list[list[Piece]]) -> list[Batch]:
        """Assign each matrix, largest first, to the rank with least work. everywhere: pieces of matrices, by rank."""
        rank, ranks, shapes = self._world.rank, self._world.world_size, self._shapes
        batches, owners, work, size = list[Batch](), dict[int, tuple[Batch, int]](), [0] * ranks, 0
        holders: dict[int, list[int]] = {}
        for holder, pieces in enumerate(everywhere):
            for piece in pieces:
                holders.setdefault(piece.row, []).append(holder)
        for number in sorted(holders, key=lambda number: (-shapes[number].numel(), number)):
            numel = shapes[number].numel()
            if not batches or size + numel > EXCHANGED_VALUES * ranks:
                batches.append(Batch({}, [[] for _ in range(ranks)], [[] for _ in range(ranks)]))
                size = 0
            size += numel
            among = holders[number] if self._stay[number] else range(ranks)
            owner = min(among, key=lambda rank: (work[rank], rank))
            work[owner] += numel * min(shapes[number], default=1)
            owners[number] = batches[-1], owner
            if owner == rank:
                batches[-1].shapes[number] = shapes[number]
        for holder, pieces in enumerate(everywhere):
            for piece in pieces:
                batch, owner = owners[piece.row]
                if holder == rank:
                    batch.mine[owner].append(piece)
                if owner == rank:
                    batch.theirs[holder].append(piece)
        return batches

    def _exchange(self, batch: Batch, values: torch.Tensor, rule: Rule) -> None:
        """Send pieces to the ranks that compute their matrices, and get them back as `rule` leaves them."""
        device = self._world.device
        sent, received = ([sum(p.length for p in pieces) for pieces in each] for each in (batch.mine, batch.theirs))
        parts = [piece.of(values) for piece in chain(*batch.mine)]
        gathered = self._world.exchange(torch.cat([values.new_empty(0), *parts]).to(device), sent, received)
        wholes = {number: gathered.new_empty(shape) for number, shape in batch.shapes.items()}
        places = [wholes[p.row].view(-1)[p.start : p.start + p.length] for p in chain(*batch.theirs)]
        _spread(gathered, places)
        for whole in wholes.values():
            whole.copy_(rule(whole))
        made = self._world.exchange(torch.cat([gathered.new_empty(0), *places]), received, sent)
        _spread(made.to(values.device), parts)


def _spread(values: torch.Tensor, places: list[torch.Tensor]) -> None:
    """Copy consecutive values to views."""
    for place, part in zip(places, values.split([len(place) for place in places]), strict=True):
        place.copy_(part)


def attach_pieces(engine: Engine) -> None:
    """Tell an optimizer of whole parameters which values belong to which parameter. Call before the first update."""
    optimizer = engine.deepspeed.basic_optimizer
    if isinstance(optimizer, WholeParameterOptimizer):
        optimizer.attached = ShardedPieces(engine) if engine.stage > 0 else Pieces()
