"""Optimizers on ZeRO's flat tensors of many parameters, which may be cut anywhere."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch

Rule = Callable[[torch.Tensor], torch.Tensor]
"""Maps a whole matrix to its replacement."""


@dataclass(frozen=True)
class Piece:
    """This rank's values of one parameter in a flat tensor."""

    row: int
    """Number of the parameter."""
    at: int
    """Index of its first value in the flat tensor."""
    start: int
    """Index of its first value in the parameter."""
    length: int
    numel: int
    """Number of values in the whole parameter, on all ranks."""

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """(length,) view of the piece in a tensor laid out like the flat master."""
        return flat.view(-1)[self.at : self.at + self.length]


class Pieces:
    """The pieces of parameters that are whole on every rank, as torch gives them to an optimizer."""

    _parameters = 1

    def of(self, flat: torch.Tensor) -> list[Piece]:
        """The pieces in a flat tensor that the optimizer updates."""
        return [Piece(0, 0, 0, flat.numel(), flat.numel())]

    def sums(self, parts: Iterable[tuple[Piece, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
        """(parameters,) sums over all ranks of the scalars that this rank's pieces give, FP64, on the device of `like`.
        A collective if parameters are spread over ranks, also for a rank without a piece."""
        total = torch.zeros(self._parameters, dtype=torch.float64, device=like.device)
        for piece, value in parts:
            total[piece.row] += value
        return total

    def replace_matrices(self, flat: torch.Tensor, values: torch.Tensor, rule: Rule) -> torch.Tensor:
        """`values`, laid out like `flat`, with every whole matrix, and each of fused experts (three dimensions),
        replaced by `rule`, which one rank computes. A collective if parameters are spread over ranks."""
        if values.dim() < 3:
            return rule(values)
        for matrix in values:
            matrix.copy_(rule(matrix))
        return values


class FlatOptimizer(torch.optim.Optimizer):
    """An optimizer that updates flat tensors, one after another."""

    @classmethod
    def build(cls, groups: list[dict[str, Any]], options: dict[str, Any], *, offload_to_host: bool) -> Self:
        """The `build` of its module, the same on every device."""
        return cls(groups, options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every flat tensor that has a gradient."""
        for group in self.param_groups:
            for flat in group["params"]:
                if flat.grad is not None:
                    self.update_flat(flat, self.state[flat], group)

    def update_flat(self, flat: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update a flat tensor in place. state: empty before the first update. group: settings and this step's `lr`."""
        raise NotImplementedError


class WholeParameterOptimizer(FlatOptimizer):
    """A flat optimizer whose rule needs whole parameters, so that above ZeRO-0 a step is a collective."""

    def __init__(self, groups: list[dict[str, Any]], options: dict[str, Any]) -> None:
        super().__init__(groups, options)
        self.attached: Pieces | None = None

    @property
    def pieces(self) -> Pieces:
        """The bounds of the parameters. Raises RuntimeError before `attach_pieces`: a guess would be wrong."""
        if self.attached is None:
            raise RuntimeError("the optimizer does not know where parameters begin and end: call attach_pieces first")
        return self.attached
