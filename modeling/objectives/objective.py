"""A task's objective: the loss of a micro-batch as a sum, and the sums behind its metrics.

Sums can be added up over micro-batches, ranks and batches of any size, whereas a mean of means would depend on how the
global batch is split.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

Forward = Callable[..., Any]
"""The model's forward pass: takes named arguments, returns transformers' output."""


class Scored(NamedTuple):
    """An objective's result for a micro-batch."""

    loss: torch.Tensor
    """() FP32: summed over everything in the micro-batch that counts, such as its labels; connected to the graph even
    if nothing counts, so that each rank takes part in every collective of the backward pass."""
    sums: torch.Tensor | None = None
    """(len(objective.sums),) float64 without gradient, on the loss's device; None if the objective has none."""
    parts: torch.Tensor | None = None
    """FP32 without gradient: the terms that `loss` sums, sample by sample, n consecutive values for each sample of the
    micro-batch. None if the objective does not compute them."""


class Objective(Protocol):
    """The interface of a module of modeling/objectives/."""

    sums: tuple[str, ...]
    """Names of the sums behind the metrics, besides the loss."""
    has_perplexity: bool
    """Whether exp(loss) is a perplexity: the loss is the mean cross-entropy of all labels."""

    def score(self, forward: Forward, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        """Run the forward pass and compute the loss. inputs, labels: from `Batch.micro_batches`."""

    def metrics(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """Metrics by name. sums: added up over any number of micro-batches; count: how many items count in them."""
