"""The results of a step on this rank: of its backward pass, and of its optimizer step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from training.distributed import World
from training.loss_scaler import ScaleChange


@dataclass
class Outcome:
    """Result of a step's forward and backward passes on this rank: sums over micro-batches, and their inputs."""

    generators: Any
    """States of the random generators before the step, to repeat it exactly."""
    label_tokens: torch.Tensor
    """() float64: counted labels over all ranks."""
    micro_batches: int
    experts: torch.Tensor | None
    """(layers, experts) tokens of the whole step; None without routers, or if the only micro-batch has them."""
    sources: tuple[str, ...]
    """Names of a mixture's sources; empty if there is only one."""
    source_of: torch.Tensor | None
    """(micro-batches, micro) int64: the source of each sample; None if there is only one source."""
    loss_sum: torch.Tensor
    """() float64: summed over this rank's labels, in nats."""
    metrics: torch.Tensor
    """(len(objective.sums),) float64"""
    routed: torch.Tensor
    """(len(METRICS),) float64 if routers are balanced; else empty."""
    by_source: torch.Tensor
    """(2, len(sources)) float64: each source's summed loss, then its number of counted labels (or whatever the task
    counts)."""


class Evaluation(NamedTuple):
    """The result on the validation set, or a part of it."""

    loss: float
    """Mean over everything that counts, in nats for language models."""
    perplexity: float | None
    """exp(loss) of language models; None for other tasks."""
    metrics: dict[str, float]
    counted: float = 0.0
    """Number of labels, or of whatever counts, on all ranks."""


@dataclass(frozen=True)
class Update:
    """The effect of an optimizer step."""

    applied: bool
    clip_coefficient: float
    """Factor that clipping applied to the gradient: 1 if it did not clip, 0 on a skipped step."""
    lr: float
    loss_scale: float
    """Loss scale of this step; 1 if nothing is scaled."""
    scale_change: ScaleChange | None
    update_ratio: float | None
    """Norm of the update over that of the weights; None when it was not measured, or nothing was applied."""


class Columns:
    """Numbers of all ranks by column name, from one gather and with one device sync."""

    def __init__(self, world: World, columns: Mapping[str, torch.Tensor]) -> None:
        """columns: (n,) float64 of this rank, each of the same length on all ranks. A collective."""
        widths = [len(column) for column in columns.values()]
        ends = accumulate(widths)
        self._places = {name: slice(end - n, end) for name, n, end in zip(columns, widths, ends, strict=True)}
        self._rows: list[list[float]] = world.gather(torch.cat([*columns.values()])).tolist()

    def rows(self, name: str) -> list[list[float]]:
        """The numbers of a column, rank by rank."""
        return [row[self._places[name]] for row in self._rows]

    def numbers(self, name: str) -> list[float]:
        """The numbers of a column with one number per rank."""
        return [number for (number,) in self.rows(name)]

    def sums(self, name: str, every: int) -> list[float]:
        """A column summed over ranks: over the first of each `every` consecutive ones."""
        return [sum(numbers) for numbers in zip(*self.rows(name)[::every], strict=True)]


class RanksDisagree(RuntimeError):
    """Ranks differ where they must agree; continuing would let their weights diverge silently."""


NORM_ROUNDING = 2.0**-17
"""[fraction] The allowed difference between two device models in a norm of the same gradients: a sum of squares in
which each value is rounded at most 128 times is within 128 x 2^-24 of the exact one, its root within half of that. 128
is an estimate of torch's reduction, two levels of about 41 for 65,536 values each; no GPU was measured."""


def difference(what: str, values: list[float], *, most: float = 0.0) -> str:
    """A line with the ranks whose value is not rank 0's; empty if all are equal, to within `most` of it. values: by
    rank, none NaN."""
    bound = most * abs(values[0]) if math.isfinite(values[0]) else 0.0
    unlike = (item for item in enumerate(values) if item[1] != values[0] and not abs(item[1] - values[0]) <= bound)
    others = ", ".join(f"rank {rank} has {value!r}" for rank, value in unlike)
    return f"{what} differs between ranks: rank 0 has {values[0]!r}, {others}" if others else ""
