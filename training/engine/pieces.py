"""Which values of an optimizer's flat tensors belong to which parameter, for optimizers that look at whole ones.

ZeRO gives an optimizer flat tensors of many parameters, which may be cut anywhere. Where a rule takes the norm or the
mean of a whole parameter, each rank computes its piece's share of it, and the shares are added up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from training.engine.engine import Engine
from training.engine.tensors import flat_masters, shape_of, shard_of, trainable_parameters


@dataclass(frozen=True)
class Piece:
    """This rank's values of one parameter in a flat tensor."""

    row: int
    """Number of the parameter."""
    at: int
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
        return [Piece(0, 0, flat.numel(), flat.numel())]

    def sums(self, parts: Iterable[tuple[Piece, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
        """(parameters,) sums over all ranks of the scalars that this rank's pieces give, FP64, on the device of `like`.

        A collective where the parameters are shared out: ranks call it equally often, also for a flat tensor in which
        they have no piece.
        """
        total = torch.zeros(self._parameters, dtype=torch.float64, device=like.device)
        for piece, value in parts:
            total[piece.row] += value
        return total

    _parameters = 1


class ShardedPieces(Pieces):
    """Of parameters that ZeRO cut up and shared out."""

    def __init__(self, engine: Engine) -> None:
        """Reads shapes and places; no collective."""
        self._world = engine.world
        self._of: dict[int, list[Piece]] = {id(flat): [] for flat in flat_masters(engine)}
        parameters = trainable_parameters(engine).values()
        self._parameters = len(parameters)
        for row, parameter in enumerate(parameters):
            shard = shard_of(engine, parameter)
            if shard is not None:
                piece = Piece(row, shard.at, shard.length, shape_of(parameter).numel())
                self._of[id(shard.flat)].append(piece)

    def of(self, flat: torch.Tensor) -> list[Piece]:
        return self._of[id(flat)]

    def sums(self, parts: Iterable[tuple[Piece, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
        # offloaded values are in host memory, and collectives on the device
        return self._world.sum(super().sums(parts, like).to(self._world.device)).to(like.device)


class WholeParameterOptimizer(torch.optim.Optimizer):
    """An optimizer whose rule looks at whole parameters."""

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
