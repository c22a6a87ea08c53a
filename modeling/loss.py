"""The training loss of a causal language model."""

from __future__ import annotations

import torch
from torch.nn import functional

IGNORED = -100
"""Label of a token that does not count."""


def label_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy in nats over the labels that count, as an FP32 scalar.

    logits: (batch, sequence, vocabulary), any floating dtype; the softmax runs in FP32. labels: (batch, sequence)
    int64, already shifted, IGNORED where masked. With every label masked the result is 0, still connected to the
    graph, so that a rank with nothing to learn takes part in every collective of the backward pass.
    """
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
