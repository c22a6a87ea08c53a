"""Cross-entropy of the model's logits at every label: the objective of language models."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from modeling.embedding_noise import EmbeddingNoise
from modeling.linear_cross_entropy import IGNORED, label_loss_sum, label_losses, likeliest
from modeling.objectives.objective import Forward, Scored


class LabelPrediction:
    """Cross-entropy in nats, in FP32, of logits (batch, sequence, vocabulary) at labels (batch, sequence)."""

    has_perplexity = True
    _own_sums: tuple[str, ...] = ()

    def __init__(self, noise: EmbeddingNoise | None = None, *, by_sample: bool = False, judged: bool = False) -> None:
        """noise: added to the model's embeddings in training. by_sample: compute `Scored.parts`. judged: in passes
        without gradients, such as those of an evaluation, count the labels that are the likeliest tokens.

        Without `by_sample` the sum comes from torch's own kernel and differs in its last bit from that of the parts.
        """
        self._noise, self._by_sample, self._judged = noise, by_sample, judged
        self.sums = self._own_sums + (("right", "judged") if judged else ())

    @property
    def judges(self) -> bool:
        """Whether a pass would now count the labels that are the likeliest tokens."""
        return self._judged and not torch.is_grad_enabled()

    def noisy(self, inputs: dict[str, Any]) -> AbstractContextManager[dict[str, Any]]:
        """Context manager: forward passes get the micro-batch's noise; yields the inputs meant for the model."""
        return nullcontext(inputs) if self._noise is None else self._noise.of(inputs)

    def score(self, forward: Forward, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        """Run the forward pass and compute the loss from all logits at once."""
        with self.noisy(inputs) as given:
            logits = forward(**given, use_cache=False).logits
        weights = self.weights(inputs, labels)
        right = likeliest(logits, labels) if self.judges else None
        if weights is None and not self._by_sample:
            return Scored(label_loss_sum(logits, labels), self._sums(labels, right))
        losses = label_losses(logits, labels)
        loss = losses.sum() if weights is None else (losses * weights).sum()
        return self.scored(loss, losses.detach(), labels, weights, right)

    def weights(self, inputs: dict[str, Any], labels: torch.Tensor) -> torch.Tensor | None:
        """FP32 factors on the labels' losses, shaped like the labels; None: 1 each."""
        return None

    def scored(
        self,
        loss: torch.Tensor,
        losses: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor | None,
        right: torch.Tensor | None = None,
    ) -> Scored:
        """The `Scored` of a micro-batch. losses: those of its labels, without gradient and before `weights`."""
        return Scored(loss, self._sums(labels, right, losses), losses if weights is None else losses * weights)

    def metrics(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """Share of labels that are the model's likeliest token; empty unless evaluations are judged."""
        if not self._judged or not sums[-1]:
            return {}
        return {"token_accuracy": sums[-2] / sums[-1]}

    def _sums(
        self, labels: torch.Tensor, right: torch.Tensor | None, losses: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        if not self._judged:
            return None
        if right is None:
            return torch.zeros(2, dtype=torch.float64, device=labels.device)
        return torch.stack([right.double().sum(), (labels != IGNORED).sum().double()])


class RowPrediction(LabelPrediction):
    """The mean over rows of each row's mean cross-entropy; counts rows that have a label."""

    has_perplexity = False
    _own_sums = ("label_loss", "labels")

    def weights(self, inputs: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """The reciprocal of the number of labels in each label's row."""
        return 1.0 / labels_of_row(labels, inputs.get("position_ids")).clamp_(min=1)

    def metrics(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """The mean over labels, which is the loss where labels count instead of rows."""
        loss, labels = sums[:2]
        return {"token_loss": loss / max(labels, 1.0)} | super().metrics(sums, count)

    def _sums(
        self, labels: torch.Tensor, right: torch.Tensor | None, losses: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        assert losses is not None, "the weights of rows need the losses of all labels"
        own = torch.stack([losses.double().sum(), (labels != IGNORED).sum().double()])
        judged = super()._sums(labels, right)
        return own if judged is None else torch.cat([own, judged])


def labels_of_row(labels: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """The number of labels that count in each position's row, int64, shaped like labels. positions: shaped like labels,
    0 where a row begins, as in packed sequences; None: every sequence is one row."""
    counts = (labels != IGNORED).long()
    if positions is None:
        return counts.sum(dim=1, keepdim=True).expand_as(labels).clone()
    row = (positions.flatten() == 0).cumsum(0)
    of_rows = torch.zeros(row.numel() + 1, dtype=torch.int64, device=labels.device)  # no more rows than positions
    return of_rows.index_add_(0, row, counts.flatten())[row].view_as(labels)
