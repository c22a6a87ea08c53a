"""Losses over pairs of answers, of which one was chosen: direct preference optimisation and its relatives.

For a pair with prompt x, chosen answer c and rejected answer r, the *log-ratio* of an answer y is log p(y|x) of the
model minus that of the reference, both summed over the answer's tokens [nats]; the *margin* h is the log-ratio of c
minus that of r. Losses in terms of beta and h, summed over pairs:

- sigmoid, -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), e the label smoothing: DPO, Rafailov et al. 2023,
  equation 7; Mitchell 2023, "A note on DPO with noisy preferences & relationship to IPO", equation 3.
- hinge, max(0, 1 - beta h): Zhao et al. 2023, "SLiC-HF".
- ipo, (h - 1 / (2 beta))^2: Azar et al. 2023, equation 17.

`sft_weight` adds the chosen answer's mean cross-entropy per token (Pang et al. 2024, equation 2). docs/finetuning.md
has the metrics, of which k1 and k3 estimate KL(p || q) (Schulman 2020, "Approximating KL Divergence").
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import functional

from config.schema import PreferenceSection
from modeling.linear_cross_entropy import IGNORED
from modeling.log_probs import answer_log_probs
from modeling.objectives.objective import Forward, Scored

Off = Callable[[], AbstractContextManager[None]]
"""Makes the model compute as its base, in evaluation mode, inside the context."""


class Preference:
    """The loss of pairs of answers, in nats; counts pairs."""

    sums: tuple[str, ...] = (
        *("log_prob_chosen", "log_prob_rejected", "ratio_chosen", "ratio_rejected", "preferred", "nll_chosen"),
        *("tokens_chosen", "tokens_rejected"),
    )
    has_perplexity = False

    def __init__(self, section: PreferenceSection, adapter_off: Off | None) -> None:
        """adapter_off: context in which the model is the reference; None if batches carry its log-probabilities."""
        self._section, self._adapter_off = section, adapter_off
        if adapter_off is not None:
            self.sums += ("k3_chosen", "k3_rejected")

    def score(self, forward: Forward, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        """inputs: those of `data.batches.preference_batches`. labels: (micro,) int64, IGNORED for a pair of padding."""
        of_reference = None
        if self._adapter_off is not None:
            with torch.no_grad(), self._adapter_off():
                of_reference = answer_log_probs(forward, inputs)
        of_tokens = answer_log_probs(forward, inputs)
        policy, real = of_tokens.sum(-1), labels != IGNORED
        reference = inputs["reference"] if of_reference is None else of_reference.sum(-1)
        ratios = torch.where(real[:, None], policy - reference, 0.0)
        lengths = (inputs["targets"] != IGNORED).sum(-1)
        nll = -policy[:, 0] / lengths[:, 0].clamp(min=1)
        loss = self._loss(ratios[:, 0] - ratios[:, 1])
        if self._section.sft_weight:
            loss = loss + self._section.sft_weight * nll
        with torch.no_grad():
            margin = ratios[:, 0] - ratios[:, 1]
            preferred = (torch.sign(margin) + 1) / 2
            columns = [policy[:, 0], policy[:, 1], ratios[:, 0], ratios[:, 1], preferred, nll, *lengths.unbind(1)]
            if of_reference is not None:
                behind = of_reference.double() - of_tokens.double()  # log(q / p); 0 outside of the answers
                columns += (behind.expm1() - behind).sum(-1).unbind(1)
            found = torch.stack([column.double() for column in columns])
            sums = torch.where(real, found, 0.0).sum(-1)
        kept = torch.where(real, loss, loss * 0)
        return Scored(kept.sum(), sums, kept.detach())

    def metrics(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """Means over pairs, and over tokens for `kl`. A pair whose margin is 0 counts as half preferred."""
        pairs, beta = max(count, 1.0), self._section.beta
        chosen, rejected, ratio_chosen, ratio_rejected, preferred, nll = (value / pairs for value in sums[:6])
        tokens = [max(value, 1.0) for value in sums[6:8]]
        found = {
            "rewards/chosen": beta * ratio_chosen,
            "rewards/rejected": beta * ratio_rejected,
            "rewards/margin": beta * (ratio_chosen - ratio_rejected),
            "rewards/accuracy": preferred,
            "log_ratio/chosen": ratio_chosen,
            "log_probs/chosen": chosen,
            "log_probs/rejected": rejected,
        }
        for estimator, first in (("kl_k1", 2), ("kl_k3", 8)):
            for side, total, number in zip(("chosen", "rejected"), sums[first : first + 2], tokens, strict=False):
                found[f"{estimator}/{side}"] = total / number
        return found | ({"nll/chosen": nll} if self._section.sft_weight else {})

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
    return answer_log_probs(forward, inputs).sum(-1)
