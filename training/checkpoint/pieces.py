"""A parameter's master and optimizer state in a checkpoint: partitioned among its ranks, not read yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Pieces:
    """A tensor whose values are the concatenation of `parts`; values after `numel` are padding."""

    parts: Sequence[torch.Tensor]
    numel: int

    def slice(self, start: int, length: int) -> torch.Tensor:
        """(length,) the values from `start` on; reads no other parts. A view where one part has them all.

        Raises ValueError past the end of the tensor.
        """
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
class OptimizerState:
    """The optimizer's state of one parameter."""

    tensors: dict[str, Pieces]
    """State tensors, FP32, of the parameter's size, by their names in the file."""
    updates: int
    """Updates so far; 0 where the optimizer does not count them."""
