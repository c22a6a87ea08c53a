"""Comparisons with plain torch in plain tensors, for the oracle, single steps and the audit of other trainers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from precision.dtypes import DTYPES
from precision.statistics import in_fp64
from precision.tolerance import relative, unit_roundoff


class Apart:
    """How far tensors are from the expected ones, in FP64 over all of them."""

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        """pairs: each tensor with the expected one."""
        self.off = self.size = self.along = 0.0
        """Sums of the squares of the differences and of the expected values, and of the products of both."""
        for found, expected in pairs:
            self.add(found, expected)

    def add(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Take one more tensor into account."""
        for part, right in in_fp64(found, expected):
            self.off += float((part - right).square().sum())
            self.size += float(right.square().sum())
            self.along += float((part * right).sum())

    @property
    def error(self) -> float:
        """||found - expected|| / ||expected||."""
        return relative(math.sqrt(self.off), math.sqrt(self.size))

    @property
    def length(self) -> float:
        """||found||."""
        return math.sqrt(max(0.0, self.off - self.size + 2 * self.along))

    @property
    def cosine(self) -> float:
        """Cosine of the angle between both; 1 where either is zero."""
        both = self.length * math.sqrt(self.size)
        return self.along / both if both else 1.0

    @property
    def factor(self) -> float:
        """The factor on the expected values that comes closest to those found; 1 if nothing is expected."""
        return self.along / self.size if self.size else 1.0


@contextmanager
def in_dtype(
    models: Mapping[nn.Module, str],
    own: Mapping[str, torch.dtype],
    *,
    computed: torch.dtype | None = None,
    dice: torch.Generator | None = None,
) -> Iterator[None]:
    """Context manager: the weights of these models are rounded to their dtypes.

    computed: the dtype to compute with all the same. own: dtypes of buffers, by name. dice: which of the two values
    beside a weight it becomes is left to chance.
    """
    whole: list[tuple[Any, torch.Tensor]] = []
    for model, name in models.items():
        for parameter in model.parameters():
            whole.append((parameter, parameter.data))
            rounded = by_chance(parameter.data, DTYPES[name], dice) if dice else parameter.data.to(DTYPES[name])
            parameter.data = rounded if computed is None else rounded.to(computed)
        for key, buffer in model.named_buffers():
            whole.append((buffer, buffer.data))
            buffer.data = buffer.data.to(own.get(key, buffer.dtype))
    try:
        yield
    finally:
        for tensor, data in reversed(whole):  # models may share some
            tensor.data = data


def by_chance(values: torch.Tensor, dtype: torch.dtype, dice: torch.Generator) -> torch.Tensor:
    """The values in `dtype`, each moved by up to one roundoff before it is rounded."""
    moved = torch.rand(values.shape, generator=dice).to(values.device).mul_(2).sub_(1).mul_(unit_roundoff(dtype))
    return moved.add_(1).mul_(values).to(dtype)


def sigmoid_preference(margin: torch.Tensor, *, beta: float, label_smoothing: float) -> torch.Tensor:
    """DPO's loss of pairs (Rafailov et al. 2023, equation 7; with smoothing Mitchell 2023, equation 3).

    margin: by how much more the model prefers the chosen answer than the reference does [nats].
    """
    right, wrong = (torch.log1p(torch.exp(-sign * beta * margin)) for sign in (1, -1))
    return (1 - label_smoothing) * right + label_smoothing * wrong


def clip_coefficient(norm: float, largest: float) -> float:
    """Factor that limits the gradient's norm to `largest`; 1 if `largest` is 0: no clipping."""
    return largest / (norm + 1e-6) if 0 < largest < norm else 1.0
