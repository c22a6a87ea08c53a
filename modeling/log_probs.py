"""Log-probabilities of given tokens under logits, without an FP32 copy of all logits.

An FP32 log-softmax of 16-bit logits and its gradient would each take twice the memory of the logits. Here one chunk of
tokens is widened at a time, in the forward pass for its log-sum-exp and again in the backward pass; only the logits
themselves and one number per token are kept.
"""

from typing import Any

import torch

from modeling.linear_cross_entropy import IGNORED
from modeling.objectives.objective import Forward

CHUNK_VALUES = 1 << 24
"""Number of logits widened at a time."""


def token_log_probs(logits: torch.Tensor, targets: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """log softmax(logits / temperature)[targets] in nats, (...) FP32, or FP64 where the logits are; 0 where IGNORED."""
    return _TokenLogProbs.apply(logits, targets, temperature)


def answer_log_probs(forward: Forward, inputs: dict[str, Any], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the input `targets`, in FP32 and its shape, by `token_log_probs`."""
    ids, targets = inputs["input_ids"].flatten(0, -2), inputs["targets"].flatten(0, -2)
    logits = forward(input_ids=ids, use_cache=False).logits
    return token_log_probs(logits, targets, temperature=temperature).view(inputs["targets"].shape)


@torch.no_grad()
def entropies(logits: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """(...) FP32 or FP64, in nats: entropy of softmax(logits / temperature)."""
    flat, wide = logits.reshape(-1, logits.shape[-1]), torch.promote_types(logits.dtype, torch.float32)
    chunks = (torch.log_softmax(chunk.to(wide) / temperature, -1) for chunk in flat.split(_rows(flat)))
    return torch.cat([-(chunk.exp() * chunk).sum(-1) for chunk in chunks]).view(logits.shape[:-1])


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        flat, counted = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1) != IGNORED
        index = targets.reshape(-1).where(counted, 0)
        wide = torch.promote_types(logits.dtype, torch.float32)
        sums = torch.cat([(chunk.to(wide) / temperature).logsumexp(-1) for chunk in flat.split(_rows(flat))])
        found = flat.gather(1, index[:, None])[:, 0].to(wide) / temperature - sums
        ctx.save_for_backward(logits, index, counted, sums)
        ctx.temperature = temperature
        return found.where(counted, 0).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, index, counted, sums = ctx.saved_tensors
        factor = gradients[0].reshape(-1).where(counted, 0)[:, None]
        temperature = ctx.temperature
        flat = logits.reshape(-1, logits.shape[-1])
        result = torch.empty_like(flat)
        rows = _rows(flat)
        for start in range(0, len(flat), rows):
            part = slice(start, start + rows)
            chunk = (flat[part].to(sums.dtype) / temperature - sums[part, None]).exp_().mul_(-factor[part])
            result[part] = chunk.scatter_add_(1, index[part, None], factor[part]) / temperature
        return result.view(logits.shape), None, None


def _rows(flat: torch.Tensor) -> int:
    return max(CHUNK_VALUES // flat.shape[-1], 1)
