"""Divergence of a student's next-token distribution from a teacher's, mixed with the cross-entropy of the labels.

At a label, with teacher p and student q, both softmax(logits / temperature):

- forward_kl: KL(p || q) = sum p (log p - log q)                                (Hinton et al. 2015, equation 1 onwards)
- reverse_kl: KL(q || p)                                                        (Gu et al. 2024, MiniLLM)
- jsd: beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q       (Agarwal et al. 2024, GKD, section 2)

The loss is (1 - ce_weight) temperature^2 divergence + ce_weight cross-entropy, from log-probabilities in FP32, a chunk
of tokens at a time. If only the teacher's k likeliest tokens are known, all others form one more outcome, for both.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from modeling.linear_cross_entropy import IGNORED
from modeling.objectives.objective import Forward, Scored

Kind = Literal["forward_kl", "reverse_kl", "jsd"]
IDS, LOG_PROBS = "teacher_ids", "teacher_log_probs"
"""Extra inputs of a batch: the teacher's likeliest tokens, (micro, sequence, k) int32, the likeliest first; and their
log-probabilities at the temperature, (micro, sequence, k + 1) FP32, the last being that of all other tokens."""
CHUNK_VALUES = 1 << 22
"""Largest number of logits in a chunk: 16 MiB of FP32."""


def divergence(p: torch.Tensor, q: torch.Tensor, *, kind: Kind, beta: float = 0.5) -> torch.Tensor:
    """Divergence of q from p in nats. p, q: (..., outcomes) log-probabilities, FP32 or FP64 -> (...)."""
    kl = partial(functional.kl_div, reduction="none", log_target=True)  # kl(q, p) is p (log p - log q)
    if kind != "jsd":
        return (kl(q, p) if kind == "forward_kl" else kl(p, q)).sum(dim=-1)
    shares = torch.tensor([beta, 1 - beta], dtype=p.dtype, device=p.device).log()
    middle = torch.logaddexp(p + shares[0], q + shares[1])
    return beta * kl(middle, p).sum(dim=-1) + (1 - beta) * kl(middle, q).sum(dim=-1)


def on_likeliest(log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """(tokens, k + 1): log-probabilities of the outcomes `ids`, (tokens, k) int64, and last that of all others."""
    others = log_probs.scatter(-1, ids, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, ids), others], dim=-1)


def likeliest(logits: torch.Tensor, *, k: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Contents of IDS and LOG_PROBS. logits: (tokens, vocabulary) -> (tokens, k) int32 and (tokens, k + 1) FP32."""
    ids, log_probs = [], []
    for chunk in logits.split(max(1, CHUNK_VALUES // logits.shape[-1])):
        whole = torch.log_softmax(chunk.float() / temperature, dim=-1)
        first = whole.topk(k, dim=-1).indices
        ids.append(first.int())
        log_probs.append(on_likeliest(whole, first))
    return torch.cat(ids), torch.cat(log_probs)


class Distillation:
    """A student's loss against a live teacher or a teacher's cached log-probabilities."""

    sums: tuple[str, ...] = ("kl", "label_cross_entropy", "teacher_agreement")
    has_perplexity = False

    def __init__(self, *, kind: Kind, beta: float, temperature: float, ce_weight: float) -> None:
        self._kind, self._beta, self._temperature, self._ce_weight = kind, beta, temperature, ce_weight
        self.teacher: Forward | None = None
        """The teacher's forward pass, without gradients; None if batches carry cached log-probabilities."""
        self.facts: dict[str, float] = {}  # metrics of a step's answers, in task opd

    def score(self, forward: Forward, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        """Run both models. The sums are KL(p || q), the cross-entropy at temperature 1, and the number of labels at
        which both have the same likeliest token."""
        inputs = dict(inputs)
        ids, log_probs = inputs.pop(IDS, None), inputs.pop(LOG_PROBS, None)
        if ids is None:
            assert self.teacher is not None, "there is neither a teacher nor what one said"
            with torch.no_grad():
                known: tuple[torch.Tensor, ...] = (self.teacher(**inputs, use_cache=False).logits.flatten(0, 1),)
        else:
            known = (log_probs.flatten(0, 1), ids.flatten(0, 1))
        logits = forward(**inputs, use_cache=False).logits.flatten(0, 1)
        size = max(1, CHUNK_VALUES // logits.shape[-1])
        targets = zip(*(values.split(size) for values in known), strict=True)
        chunks = zip(logits.split(size), targets, labels.flatten().split(size), strict=True)
        scored = partial(checkpoint, self._of_chunk, use_reentrant=False, preserve_rng_state=False)
        losses, sums, parts = zip(*(scored(ours, named, *theirs) for ours, theirs, named in chunks), strict=True)
        return Scored(torch.stack(losses).sum(), torch.stack(sums).sum(dim=0), torch.cat(parts))

    def metrics(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """Means over the labels."""
        return {name: total / max(count, 1.0) for name, total in zip(self.sums, sums, strict=True)} | self.facts

    def _of_chunk(
        self, logits: torch.Tensor, labels: torch.Tensor, known: torch.Tensor, ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Summed loss; and, without gradient, the (3,) float64 sums and the (tokens,) losses of the labels. logits:
        (tokens, vocabulary). known: the teacher's logits or, with ids, its log-probabilities."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        counts = labels != IGNORED
        q = torch.log_softmax(logits / self._temperature, dim=-1)
        if ids is None:
            p, likeliest = torch.log_softmax(known.to(logits.dtype) / self._temperature, dim=-1), known.argmax(dim=-1)
        else:
            p, likeliest = known.to(logits.dtype), ids[:, 0].long()
            q = on_likeliest(q, ids.long())
        apart = divergence(p, q, kind=self._kind, beta=self._beta)
        entropy = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        loss = (1 - self._ce_weight) * self._temperature**2 * apart
        if self._ce_weight:
            loss = loss + self._ce_weight * entropy
        with torch.no_grad():
            kl = divergence(p, q, kind="forward_kl")
            rows = torch.stack([kl, entropy, (logits.argmax(dim=-1) == likeliest).to(kl.dtype)])
            sums = torch.where(counts, rows, 0.0).sum(dim=1, dtype=torch.float64)
        kept = torch.where(counts, loss, 0.0)
        return kept.sum(), sums, kept.detach()
