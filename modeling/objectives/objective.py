"""A task's objective: the loss of a micro-batch as a sum, and the sums behind its metrics.

Sums, because they can be added up over micro-batches, ranks and batches of any size: the mean of means would depend on
how the global batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

Forward = Callable[..., Any]
"""The model's forward pass: named arguments to transformers' output."""


class Scored(NamedTuple):
    """A micro-batch under an objective."""

    loss: torch.Tensor
    """() of FP32: summed over everything in the micro-batch that counts, such as its labels; connected to the graph
    also where nothing counts, so that each rank takes part in every collective of the backward pass."""
    sums: torch.Tensor | None = None
    """(len(objective.sums),) float64 without gradient, on the loss's device; None where the objective has none."""
    parts: torch.Tensor | None = None
    """FP32 without gradient, what `loss` is the sum of, sample by sample: n values belong to each of the micro-batch,
    one after another. None where the objective does not know them."""


class Objective(Protocol):
    """The interface of a module of modeling/objectives/."""

    sums: tuple[str, ...]
    """Names of what is added up for the metrics, besides the loss."""
    has_perplexity: bool
    """Whether exp(loss) is a perplexity: the loss is the mean cross-entropy of all labels."""

    def score(self, forward: Forward, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        """Forward pass and loss. inputs, labels: as `Batch.micro_batches` gives them."""

    def metrics(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """Metrics by name. sums: added up over any number of micro-batches; count: of what counts in them."""
