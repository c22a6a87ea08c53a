"""Policy-gradient losses over groups of sampled answers, and the advantages that weight them.

Per token, pi is the current probability, pi_old the trainer's before the first update on these answers, mu the
sampler's, each by softmax(logits / temperature); rho = pi / pi_old; A is the advantage.

- GRPO (Shao et al. 2024, equation 3): A = (r - mean) / (std + eps) of the group; the mean over answers of each answer's
  mean over tokens of -min(rho A, clip(rho, 1 - low, 1 + high) A).
- DAPO (Yu et al. 2025, equation 8): the same, mean over all tokens, high > low.
- Dr. GRPO (Liu et al. 2025): A = r - mean; the sum over tokens, divided by answers x max_new_tokens.
- RLOO (Ahmadian et al. 2024, equation 8): A = r minus the mean of the others = G / (G - 1) (r - mean); divided as in
  Dr. GRPO, which is the paper's sum over tokens up to the constant max_new_tokens.
- GSPO (Zheng et al. 2025, equation 5): rho is exp of the mean of log rho over the answer's tokens.
- CISPO (MiniMax 2025, equation 4): -sg(min(rho, high)) A log pi, mean over all tokens.

`correction` multiplies a token's loss by w = pi_old / mu, capped (truncated importance sampling, Yao et al. 2025) or
set to 0 outside two bounds (IcePop, Ling Team 2025). `beta` adds beta rho k3, with k3 = exp(-k1) - 1 + k1 and k1 =
log pi - log p of the reference: only with the factor rho is its gradient that of the KL divergence (DeepSeek-V3.2 2025,
section 3.1). Each loss is a sum over the global batch divided by the sum of `counts_of`, however the batch is split.
"""

from collections.abc import Sequence
from typing import Any

import torch

from config.schema import GrpoSection
from modeling.linear_cross_entropy import IGNORED
from modeling.log_probs import entropies, token_log_probs
from modeling.objectives.objective import Forward, Scored

EPS = 1e-4  # added to a group's standard deviation
OLD, SAMPLER, REFERENCE = "old_log_probs", "sampler_log_probs", "reference_log_probs"
"""Inputs of a batch, (micro, length) FP32 at the labels: log pi_old (not in an evaluation), log mu, log p."""
ADVANTAGE, REWARD, ENDED = "advantage", "reward", "ended"
"""Inputs of a batch, (micro,) FP32; an answer truncated at grpo.max_new_tokens has ended = 0."""


def advantages(rewards: torch.Tensor, kind: str) -> torch.Tensor:
    """(groups, G) FP64 rewards, NaN for none -> advantages; 0 without a reward, or without another to compare with."""
    known = ~rewards.isnan()
    rewards = rewards - torch.where(known, rewards, torch.inf).amin(1, keepdim=True)  # equal ones are exactly 0
    count = known.sum(1, keepdim=True)
    mean = rewards.nansum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(known & (count > 1), rewards - mean, 0.0)
    others = (count - 1).clamp(min=1)
    if kind == "group_std":
        return centred / ((centred.square().sum(1, keepdim=True) / others).sqrt() + EPS)
    return centred * count / others if kind == "rloo" else centred


def counts_of(lengths: torch.Tensor, section: GrpoSection) -> torch.Tensor:
    """(answers,) int64: what each answer adds to the divisor of the loss. lengths: [tokens]"""
    if section.loss == "token":
        return lengths
    return torch.full_like(lengths, section.max_new_tokens if section.loss == "constant" else 1)


def corrections(gap: torch.Tensor, section: GrpoSection) -> torch.Tensor:
    """Correction weights of tokens. gap: log pi_old - log mu."""
    if section.correction == "none":
        return torch.ones_like(gap)
    weight = gap.exp()
    if section.correction == "truncate":
        return weight.clamp(max=section.correction_high)
    kept = (weight >= 1 / section.correction_high) & (weight <= section.correction_high)
    return torch.where(kept, weight, 0.0)


class PolicyGradient:
    """The loss of sampled answers; in an evaluation minus their reward."""

    sums: tuple[str, ...] = ("answers", "reward", "tokens", "ended", "entropy", "clipped", "kl", "left_out")
    has_perplexity = False

    def __init__(self, section: GrpoSection) -> None:
        self.section = section
        self.facts: dict[str, float] = {}  # metrics of the step, set where its answers are sampled; none in evaluations

    def score(self, forward: Forward, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        """inputs: input_ids and those named above. labels: (micro, length) int64, IGNORED outside the answer."""
        section, mask = self.section, labels != IGNORED
        logits = forward(input_ids=inputs["input_ids"], use_cache=False).logits
        now = token_log_probs(logits, labels, temperature=section.temperature)
        lengths = mask.sum(1)
        real, reward = lengths > 0, torch.where(lengths > 0, inputs[REWARD], 0.0)  # not a row of padding
        if OLD not in inputs:
            loss, extra = now.sum(1) * 0 - reward, torch.zeros(3, len(now), device=now.device)
        else:
            by_token, extra = self._losses(inputs, now, mask)
            loss = torch.where(mask, by_token, 0.0).sum(1)
            if section.loss == "sequence":
                loss = loss / lengths.clamp(min=1)
        with torch.no_grad():
            entropy = torch.where(mask, entropies(logits, temperature=section.temperature), 0.0).sum(1)
            columns = [real, reward, lengths, inputs[ENDED] * real, entropy, *extra]
            sums = torch.stack([column.double().sum() for column in columns])
        return Scored(loss.sum(), sums, loss.detach())

    def _losses(
        self, inputs: dict[str, Any], now: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(micro, length) losses of tokens; and (3, micro), without gradient: clipped tokens, KL, tokens left out."""
        section, old, advantage = self.section, inputs[OLD].to(now.dtype), inputs[ADVANTAGE][:, None]
        log_rho = torch.where(mask, now - old, 0.0)
        ratio = rho = log_rho.exp()
        if section.ratio == "sequence":
            ratio = (log_rho.sum(1) / mask.sum(1).clamp(min=1)).exp()[:, None].expand_as(rho)
        assert section.clip_low is not None and section.clip_high is not None
        weight = corrections(torch.where(mask, old - inputs[SAMPLER], 0.0), section)
        if section.surrogate == "cispo":
            loss, clipped = -ratio.detach().clamp(max=section.clip_high) * advantage * now, ratio > section.clip_high
        else:
            bounded = ratio.clamp(1 - section.clip_low, 1 + section.clip_high)
            loss = -torch.minimum(ratio * advantage, bounded * advantage)
            clipped = bounded * advantage < ratio * advantage
        loss, kl = loss * weight, torch.zeros_like(now)
        if REFERENCE in inputs:
            k1 = torch.where(mask, now - inputs[REFERENCE], 0.0)
            kl = (-k1).exp() - 1 + k1
            loss = loss + section.beta * rho * kl
        return loss, torch.stack([(what * mask).sum(1).detach() for what in (clipped, kl, weight == 0)])

    def metrics(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """Means over answers, and over tokens for entropy and KL."""
        answers, reward, tokens, ended, entropy, clipped, kl, left_out = sums
        rows, places = max(answers, 1.0), max(tokens, 1.0)
        found = {"reward/mean": reward / rows, "length": tokens / rows, "truncated": 1 - ended / rows}
        found |= {"entropy": entropy / places}
        if self.facts:
            found |= {"clip_share": clipped / places}
            found |= {"kl": kl / places} if self.section.beta else {}
            found |= {"left_out": left_out / places} if self.section.correction == "mask" else {}
        return found | self.facts
