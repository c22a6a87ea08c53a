"""Optimizers on ZeRO's flat tensors of many parameters, which may be cut anywhere."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch

Rule = Callable[[torch.Tensor], torch.Tensor]
"""A whole matrix to what replaces it."""


@dataclass(frozen=True)
class Piece:
    """This rank's values of one parameter in a flat tensor."""

    row: int
    """Number of the parameter."""
    at: int
    """Place of its first value in the flat tensor."""
    start: int
    """Place of its first value in the parameter."""
    length: int
    numel: int
    """Values of the whole parameter, on all ranks."""

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """(length,) view of the piece in a tensor laid out as the flat master is."""
        return flat.view(-1)[self.at : self.at + self.length]


class Pieces:
    """The pieces of parameters that are whole on every rank, as torch gives them to an optimizer."""

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

        A tensor of three dimensions is of fused experts: a matrix for each of them. A collective where the parameters
        are shared out, as `sums` is. Each matrix is computed once, by one rank, whose result the others get.
        """
        if values.dim() < 3:
            return rule(values)
        for matrix in values:
            matrix.copy_(rule(matrix))
        return values

    _parameters = 1


class FlatOptimizer(torch.optim.Optimizer):
    """An optimizer that is given flat tensors, one after the other."""

    @classmethod
    def build(cls, groups: list[dict[str, Any]], options: dict[str, Any], *, offload_to_host: bool) -> Self:
        """`build` of its module: the same on every device."""
        return cls(groups, options)

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
        self.attached: Pieces | None = None

    @property
    def pieces(self) -> Pieces:
        """The bounds of the parameters. Raises RuntimeError before `attach_pieces`: a guess would be wrong."""
        if self.attached is None:
            raise RuntimeError("the optimizer does not know where parameters begin and end: call attach_pieces first")
        return self.attached
