"""Cross-entropy of the model's logits at every label: the objective of language models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from modeling.linear_cross_entropy import label_losses
from modeling.objectives.objective import Forward, Scored


class LabelPrediction:
    """Cross-entropy in nats, in FP32, of logits (batch, sequence, vocabulary) at labels (batch, sequence)."""

    sums: tuple[str, ...] = ()
    is_label_prediction = True

    def score(self, forward: Forward, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        """All logits at once."""
        losses = label_losses(forward(**inputs, use_cache=False).logits, labels)
        return Scored(losses.sum(), parts=losses.detach())

    def metrics(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """None: perplexity follows from the loss."""
        return {}
