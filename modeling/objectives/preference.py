"""Losses over pairs of answers, of which one was chosen: direct preference optimisation and its relatives.

Of a pair with prompt x, chosen answer c and rejected answer r, the *log-ratio* of an answer y is log p(y|x) of the
model minus that of the reference, both summed over the answer's tokens [nats]; the *margin* h is the log-ratio of c
minus that of r. Losses of beta and h, summed over pairs:

- sigmoid, -log sigmoid(beta h): DPO, Rafailov et al. 2023, "Direct Preference Optimization", equation 7. With label
  smoothing e, -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h): Mitchell 2023, "A note on DPO with noisy
  preferences & relationship to IPO", equation 3.
- hinge, max(0, 1 - beta h): Zhao et al. 2023, "SLiC-HF", as Liu et al. 2023, "Statistical Rejection Sampling Improves
  Preference Optimization" write it.
- ipo, (h - 1 / (2 beta))^2: Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human
  Preferences", equation 17.

`sft_weight` adds the chosen answer's mean cross-entropy by token, as Pang et al. 2024, "Iterative Reasoning Preference
Optimization", equation 2. The implicit reward of an answer is beta times its log-ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import functional

from config.schema import PreferenceSection
from modeling.log_probs import token_log_probs
from modeling.objectives.objective import Forward, Scored

IGNORED = -100
"""Of targets that belong to no answer, and of labels of padding."""

Off = Callable[[], AbstractContextManager[None]]
"""Makes the model compute as its base, in evaluation mode, inside the context."""


class Preference:
    """The loss of pairs of answers, in nats; what counts are pairs."""

    sums = ("log_prob_chosen", "log_prob_rejected", "ratio_chosen", "ratio_rejected", "preferred", "nll_chosen")
    has_perplexity = False

    def __init__(self, section: PreferenceSection, adapter_off: Off | None) -> None:
        """adapter_off: how to compute the reference; None where the batches have it."""
        self._section, self._adapter_off = section, adapter_off

    def score(self, forward: Forward, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        """inputs: as `data.preference_batches` makes them. labels: (micro,) int64, IGNORED for a pair of padding."""
        reference = self._reference(forward, inputs)
        policy = log_probs(forward, inputs)
        real = labels != IGNORED
        ratios = torch.where(real[:, None], policy - reference, 0.0)
        lengths = (inputs["targets"][:, 0] != IGNORED).sum(-1).clamp(min=1)
        nll = -policy[:, 0] / lengths
        loss = self._loss(ratios[:, 0] - ratios[:, 1])
        if self._section.sft_weight:
            loss = loss + self._section.sft_weight * nll
        with torch.no_grad():
            margin = ratios[:, 0] - ratios[:, 1]
            preferred = (torch.sign(margin) + 1) / 2
            found = torch.stack([policy[:, 0], policy[:, 1], ratios[:, 0], ratios[:, 1], preferred, nll])
            sums = torch.where(real, found.double(), 0.0).sum(-1)
        kept = torch.where(real, loss, loss * 0)
        return Scored(kept.sum(), sums, kept.detach())

    def metrics(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """Means over pairs. A pair whose margin is 0 counts as half preferred."""
        pairs, beta = max(count, 1.0), self._section.beta
        chosen, rejected, ratio_chosen, ratio_rejected, preferred, nll = (value / pairs for value in sums)
        found = {
            "rewards/chosen": beta * ratio_chosen,
            "rewards/rejected": beta * ratio_rejected,
            "rewards/margin": beta * (ratio_chosen - ratio_rejected),
            "rewards/accuracy": preferred,
            "log_ratio/chosen": ratio_chosen,
            "log_probs/chosen": chosen,
            "log_probs/rejected": rejected,
        }
        return found | ({"nll/chosen": nll} if self._section.sft_weight else {})

    def _reference(self, forward: Forward, inputs: dict[str, Any]) -> torch.Tensor:
        if self._adapter_off is None:
            values: torch.Tensor = inputs["reference"]
            return values
        with torch.no_grad(), self._adapter_off():
            return log_probs(forward, inputs)

    def _loss(self, margin: torch.Tensor) -> torch.Tensor:
        section = self._section
        scaled = section.beta * margin
        if section.loss == "hinge":
            return functional.relu(1 - scaled)
        if section.loss == "ipo":
            return (margin - 1 / (2 * section.beta)).square()
        smoothing = section.label_smoothing
        return -(1 - smoothing) * functional.logsigmoid(scaled) - smoothing * functional.logsigmoid(-scaled)


def log_probs(forward: Forward, inputs: dict[str, Any]) -> torch.Tensor:
    """(micro, 2) FP32: log-probabilities of both answers of each pair, summed over their tokens, in nats."""
    ids, targets = inputs["input_ids"], inputs["targets"]
    logits = forward(input_ids=ids.flatten(0, 1), use_cache=False).logits
    return token_log_probs(logits, targets.flatten(0, 1), ignored=IGNORED).sum(-1).view(ids.shape[:2])
