"""Classification of texts or of their words: cross-entropy, and metrics from counts per label."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from modeling.linear_cross_entropy import IGNORED
from modeling.objectives.objective import Forward, Scored


class Classification:
    """Cross-entropy in nats, in FP32, of logits (..., labels) at labels (...).

    The sums count, for each label, how often it was right, was predicted, and was the truth. All metrics follow from
    them: accuracy; macro F1 over the labels that were predicted or true; binary F1 of the second of two labels; and
    Matthews' correlation as in Gorodkin 2004, 0 if predictions or truths have one label only.
    """

    has_perplexity = False

    def __init__(self, labels: int, *, by_sample: bool = False) -> None:
        """labels: their number. by_sample: compute `Scored.parts`, as in `LabelPrediction`."""
        self._labels, self._by_sample = labels, by_sample
        self.sums = tuple(f"{what} {label}" for what in ("right", "predicted", "there") for label in range(labels))

    def score(self, forward: Forward, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        """labels: int64, (batch, 1) for sequences or (batch, sequence) for words, IGNORED where none counts."""
        logits = forward(**inputs).logits.float()
        logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        reduction = "none" if self._by_sample else "sum"
        losses = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction=reduction)
        # neither bincount nor indexing by a mask: the host would wait for the size of the result
        every = torch.arange(self._labels, device=labels.device)
        there = labels[:, None] == every
        predicted = (logits.detach().argmax(-1)[:, None] == every) & (labels != IGNORED)[:, None]
        sums = torch.stack([there & predicted, predicted, there]).sum(1).double().flatten()
        return Scored(losses.sum(), sums, losses.detach() if self._by_sample else None)

    def metrics(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """accuracy, macro_f1, matthews, and with two labels f1."""
        labels = self._labels
        right, predicted, there = (sums[part * labels : (part + 1) * labels] for part in range(3))
        both = [(hits, guessed + real) for hits, guessed, real in zip(right, predicted, there, strict=True)]
        scores = [2 * hits / total for hits, total in both if total]
        total, agreed = sum(there), sum(right)
        found = {"accuracy": agreed / total if total else 0.0, "macro_f1": sum(scores) / len(scores) if scores else 0.0}
        if labels == 2:
            found["f1"] = 2 * both[1][0] / both[1][1] if both[1][1] else 0.0
        covariance = agreed * total - sum(a * b for a, b in zip(predicted, there, strict=True))
        spread = (total**2 - sum(a**2 for a in predicted)) * (total**2 - sum(b**2 for b in there))
        found["matthews"] = covariance / math.sqrt(spread) if spread > 0 else 0.0
        return found


class Regression:
    """Squared error, in FP32, of one number per text, and Pearson's correlation. The numbers to predict are the input
    `targets`, FP32 whatever the model computes in: 16 bits would change them."""

    has_perplexity = False
    sums: tuple[str, ...] = ("count", "predicted", "there", "predicted squared", "there squared", "product")

    def score(self, forward: Forward, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        """labels: (batch, 1) int64, IGNORED for rows that do not count. inputs: including targets, (batch, 1) FP32."""
        given = {name: value for name, value in inputs.items() if name != "targets"}
        predicted, there = forward(**given).logits.float().reshape(-1), inputs["targets"].float().reshape(-1)
        counts = labels.reshape(-1) != IGNORED
        losses = torch.where(counts, (predicted - there).square(), 0.0)
        x, y = (torch.where(counts, values, 0.0).double() for values in (predicted.detach(), there))
        found = [counts.sum().double(), x.sum(), y.sum(), x.square().sum(), y.square().sum(), (x * y).sum()]
        return Scored(losses.sum(), torch.stack(found), losses.detach())

    def metrics(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """pearson: 0 if either side is constant; rmse: the root of the mean squared error."""
        n, x, y, xx, yy, xy = sums
        if not n:
            return {"pearson": 0.0, "rmse": 0.0}
        spread = (n * xx - x * x) * (n * yy - y * y)
        rmse = math.sqrt(max(xx - 2 * xy + yy, 0.0) / n)
        return {"pearson": (n * xy - x * y) / math.sqrt(spread) if spread > 0 else 0.0, "rmse": rmse}
