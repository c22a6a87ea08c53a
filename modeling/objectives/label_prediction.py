"""Cross-entropy of the model's logits at every label: the objective of language models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from modeling.linear_cross_entropy import label_loss_sum
from modeling.objectives.objective import Forward, Scored


class LabelPrediction:
    """Cross-entropy in nats, in FP32, of logits (batch, sequence, vocabulary) at labels (batch, sequence)."""

    sums: tuple[str, ...] = ()
    is_label_prediction = True

    def score(self, forward: Forward, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        """All logits at once."""
        return Scored(label_loss_sum(forward(**inputs, use_cache=False).logits, labels))

    def metrics(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """None: perplexity follows from the loss."""
        return {}
