"""A parameter's master and optimizer state in a checkpoint: partitioned among its ranks, not read yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from modeling.tensor_parallel import Place


@dataclass(frozen=True)
class Pieces:
    """A tensor whose values are the concatenation of `parts`; values after `numel` are padding."""

    parts: Sequence[torch.Tensor]
    numel: int

    def slice(self, start: int, length: int) -> torch.Tensor:
        """(length,) the values from `start` on; a view where one part has them all. Raises ValueError past the end."""
        if start + length > self.numel:
            raise ValueError(f"values {start} to {start + length} of {self.numel} were asked for")
        found, at = [], 0
        for part in self.parts:
            lower, upper = max(start, at), min(start + length, at + part.numel())
            if lower < upper:
                found.append(part.view(-1)[lower - at : upper - at])
            at += part.numel()
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else torch.empty(0)


@dataclass(frozen=True)
class JoinedPieces:
    """A tensor that several ranks share: each run of `sum(widths)` values holds a piece per rank, in order."""

    slices: Sequence[AnyPieces]
    widths: Sequence[int]
    """[values] Length of a run of values, by rank."""
    numel: int

    def slice(self, start: int, length: int) -> torch.Tensor:
        """(length,) the values from `start` on."""
        whole = sum(self.widths)
        if whole == self.numel:
            return self._within_the_run(start, length)
        first, last = start // whole, -(-(start + length) // whole)
        each = [
            piece.slice(first * width, (last - first) * width).view(-1, width)
            for piece, width in zip(self.slices, self.widths, strict=True)
        ]
        return torch.cat(each, 1).view(-1)[start - first * whole :][:length]

    def _within_the_run(self, start: int, length: int) -> torch.Tensor:
        found, at = [torch.empty(0)], 0
        for piece, width in zip(self.slices, self.widths, strict=True):
            lower, upper = max(start, at), min(start + length, at + width)
            if lower < upper:
                found.append(piece.slice(lower - at, upper - lower))
            at += width
        return torch.cat(found)


@dataclass(frozen=True)
class SlicedPieces:
    """One rank's slice of a whole tensor."""

    whole: AnyPieces
    place: Place
    numel: int

    def slice(self, start: int, length: int) -> torch.Tensor:
        """(length,) the slice's values from `start` on."""
        place = self.place
        if place.width == self.numel:
            return self.whole.slice(place.first + start, length)
        first, last = start // place.width, -(-(start + length) // place.width)
        runs = self.whole.slice(first * place.whole, (last - first) * place.whole).view(-1, place.whole)
        mine = runs[:, place.first : place.first + place.width].reshape(-1)
        return mine[start - first * place.width :][:length]


AnyPieces = Pieces | JoinedPieces | SlicedPieces


@dataclass(frozen=True)
class OptimizerState:
    """The optimizer's state of one parameter."""

    tensors: Mapping[str, AnyPieces]
    """State tensors, FP32, of the parameter's size, by their names in the file."""
    updates: int
    """Updates so far; 0 where the optimizer does not count them."""
