"""Cross-entropy of a linear layer's logits, one chunk of tokens at a time: no tensor ever holds all logits.

A chunk's gradients are computed in the forward pass, while its logits exist, as in Liger Kernel (Hsu et al. 2024,
section 3.2). *The weight's gradient is summed over chunks in FP32* and rounded once. *Gradients are multiplied by
`gradient_scale`*, the gradient that the loss will receive in the backward pass: without it an FP16 gradient of the
hidden states would be rounded before the loss scale could lift it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional


class Vocabulary(Protocol):
    """The ranks that share the head's rows, and which rows this rank has."""

    @property
    def first(self) -> int:
        """[token] First vocabulary row of this rank."""

    @property
    def size(self) -> int:
        """[tokens] Vocabulary size over all ranks."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """In-place sum over these ranks."""

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """In-place maximum over these ranks."""


class Head(NamedTuple):
    """Computes logits from hidden states: cap(scale x (hidden weight^T + bias))."""

    weight: torch.Tensor
    """(vocabulary, hidden size); only this rank's part of the vocabulary if ranks share it"""
    bias: torch.Tensor | None
    """(vocabulary,)"""
    scale: float = 1.0
    cap: float | None = None
    """Logits x become cap tanh(x / cap), as in Gemma 2."""
    shared: Vocabulary | None = None
    """The ranks that share the vocabulary; they have the same hidden states and labels. Each token's three softmax sums
    and the gradient of the hidden states are reduced over them (Shoeybi et al. 2019, section 3)."""
    softmax: Callable[..., torch.Tensor] | None = None
    """`modeling.loss_kernel.fused_softmax` if it works on this device; None: torch's operators. Not used with a bias,
    whose gradient is a sum of FP32 gradients, nor with a shared vocabulary."""


def linear_cross_entropy(
    hidden: torch.Tensor,
    head: Head,
    labels: torch.Tensor,
    *,
    chunk_tokens: int,
    gradient_scale: torch.Tensor | float = 1.0,
    weights: torch.Tensor | None = None,
    right: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy in nats, summed over the labels that count, as a scalar; and per label, without gradient.

    hidden: (..., hidden size). labels: (...) int64, already shifted, IGNORED where masked. Matmuls run in the dtype of
    autocast where it is on, else in that of the weight; the softmax and both results are FP32 or wider. gradient_scale:
    the gradient that the sum will receive; any other value is correct too, but 16-bit gradients are rounded at this
    scale. weights: factors on the losses in the sum, shaped like labels; None: 1 each. right: contiguous, FP32, shaped
    like labels, filled with the result of `likeliest`; only without gradients. The sum supports one backward pass,
    since it keeps gradients instead of activations. Raises ValueError.
    """
    if right is not None and torch.is_grad_enabled():
        raise ValueError("which labels are the likeliest is found without gradients only")
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(f"hidden states of {tuple(hidden.shape[:-1])} tokens, labels of {tuple(labels.shape)}")
    device = hidden.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    scale = torch.as_tensor(gradient_scale, device=hidden.device)
    scale = torch.where(scale == 0, 1.0, scale)  # a zero gradient must not make 0 / 0
    flat = hidden.reshape(-1, hidden.shape[-1])
    options = (None if weights is None else weights.reshape(-1), head, chunk_tokens, compute)
    filled = None if right is None else right.view(-1)
    total, losses = _ChunkedLoss.apply(
        flat, head.weight, head.bias, labels.reshape(-1), scale, *options, torch.is_grad_enabled(), filled
    )
    return total, losses.view(labels.shape)


_making_gradients = False


def is_making_gradients() -> bool:
    """Whether the forward pass is now doing work of the backward pass: computing the gradients of a chunk."""
    return _making_gradients


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        gradient_scale: torch.Tensor,
        weights: torch.Tensor | None,
        head: Head,
        chunk_tokens: int,
        compute: torch.dtype,
        with_gradients: bool,
        right: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        global _making_gradients
        wide = torch.promote_types(compute, torch.float32)
        needs = [with_gradients and needed for needed in ctx.needs_input_grad[:3]]
        made = (
            torch.empty_like(hidden) if needs[0] else None,
            torch.zeros_like(weight, dtype=wide) if needs[1] else None,
            torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None,
        )
        losses = torch.zeros(len(labels), dtype=wide, device=hidden.device)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        gradient_scale = gradient_scale.to(wide)
        with torch.autocast(hidden.device.type, enabled=False):
            fused = head.softmax if any(needs) and bias is None and head.shared is None else None
            factors = (gradient_scale if weights is None else gradient_scale * weights).expand(len(labels))
            narrow = weight.to(compute)
            offset = None if bias is None else bias.to(compute)
            for start in range(0, len(labels), chunk_tokens):
                rows = slice(start, start + chunk_tokens)
                states = hidden[rows].to(compute)
                logits = functional.linear(states, narrow, offset)
                if fused is not None:
                    losses[rows] = fused(logits, labels[rows], factors[rows], scale=head.scale, cap=head.cap)
                else:
                    logits = logits.to(wide)
                    filled = {} if right is None else {"right": right[rows]}
                    losses[rows] = _softmax_loss(logits, labels[rows], head, any(needs), **filled)
                weighted = losses[rows] if weights is None else losses[rows] * weights[rows]
                total += weighted.sum()
                if any(needs):
                    _making_gradients = True
                    try:
                        if fused is None:
                            logits.mul_(factors[rows].unsqueeze(1))
                        _add_gradients(made, rows, logits, states, narrow)
                    finally:
                        _making_gradients = False
                del logits  # before the next chunk's
        ctx.made, ctx.scale = made, gradient_scale
        if head.shared is not None and made[0] is not None:
            head.shared.sum(made[0])
        ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        ctx.mark_non_differentiable(losses)
        return total, losses

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.made is None:
            raise RuntimeError("a chunked loss supports one backward pass: its gradients were returned already")
        made, ctx.made = ctx.made, None
        ratio = upstream[0] / ctx.scale  # 1 if the caller gave the right scale; nan or inf if the loss was
        pairs = zip(made, ctx.dtypes, strict=True)
        gradients = [None if item is None else item.mul_(ratio).to(dtype) for item, dtype in pairs]
        return (*gradients, *[None] * 8)


def _softmax_loss(
    logits: torch.Tensor, labels: torch.Tensor, head: Head, with_gradient: bool, *, right: torch.Tensor | None = None
) -> torch.Tensor:
    """(tokens,) losses of a chunk. Overwrites `logits`; if with_gradient, with their gradient. logits: (tokens,
    vocabulary), FP32 or wider, before scale and cap. right: (tokens,), filled as by `likeliest`."""
    scale, cap, shared = head.scale, head.cap, head.shared
    counts = (labels != IGNORED).unsqueeze(1)
    targets = labels.clamp(min=0).unsqueeze(1)
    here = None
    if shared is not None:
        targets = targets - shared.first
        here = (targets >= 0) & (targets < logits.shape[1])
        targets = targets.clamp(0, logits.shape[1] - 1)
    if scale != 1.0:
        logits.mul_(scale)
    slope = None
    if cap is not None:
        logits.div_(cap).tanh_()
        slope = 1 - logits.square() if with_gradient else None
        logits.mul_(cap)
    largest = logits.amax(dim=1, keepdim=True)
    logits.sub_(largest if shared is None else shared.maximum(largest))
    of_target = logits.gather(1, targets)
    ties = None if right is None else (logits == 0).sum(dim=1, keepdim=True)
    sums = logits.exp_().sum(dim=1, keepdim=True)
    if shared is not None and here is not None:
        of_target = torch.where(here, of_target, 0.0)
        added = [sums, of_target] if ties is None else [sums, of_target, ties.to(sums.dtype)]
        sums, of_target, *counted = shared.sum(torch.stack(added)).unbind()
        ties = counted[0] if counted else None
    if right is not None:
        assert ties is not None
        right.copy_(torch.where(counts & (of_target == 0), 1 / ties.clamp(min=1), 0.0).squeeze(1))
    loss = torch.where(counts, sums.log() - of_target, 0.0).squeeze(1)
    if not with_gradient:
        return loss
    logits.div_(sums)
    minus_one = torch.full_like(of_target, -1.0)
    logits.scatter_add_(1, targets, minus_one if here is None else minus_one * here)
    logits.mul_(counts)
    if scale != 1.0:
        logits.mul_(scale)
    if slope is not None:
        logits.mul_(slope)
    return loss


def _add_gradients(
    made: tuple[torch.Tensor | None, ...],
    rows: slice,
    gradient: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    """Add a chunk to the gradients of the hidden states, in their dtype, and of weight and bias, in FP32 or wider.
    gradient: that of its logits. states, weight: in the compute dtype."""
    of_hidden, of_weight, of_bias = made
    narrow = gradient.to(weight.dtype)
    if of_hidden is not None:
        of_hidden[rows] = narrow @ weight
    if of_bias is not None:
        of_bias += gradient.sum(dim=0)
    if of_weight is None:
        return
    wide = of_weight.dtype
    if narrow.dtype != wide and narrow.is_cuda:  # tensor cores take 16 bits and sum in FP32
        torch.addmm(of_weight, narrow.t(), states, out_dtype=wide, out=of_weight)
    else:
        of_weight.addmm_(gradient.t().to(wide), states.to(wide))


IGNORED = -100
"""Label of a token that does not count."""


def label_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy in nats over the labels that count, as an FP32 scalar.

    logits: (batch, sequence, vocabulary), any floating dtype. labels: (batch, sequence) int64, already shifted. With
    every label masked the result is 0, still connected to the graph, so that each rank takes part in every collective.
    """
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def likeliest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """1 where no token is likelier than the label, 0 elsewhere and for masked labels; FP32, shaped like the labels.
    Each of n tokens that tie as likeliest counts 1 / n, so that a model without preferences is right by chance."""
    largest = logits.amax(-1, keepdim=True)
    of_label = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1))
    found = (of_label == largest).squeeze(-1) & (labels != IGNORED)
    return found / (logits == largest).sum(-1).clamp(min=1)


def label_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The terms of `label_loss_sum`, (batch, sequence) of FP32: 0 where a label is masked."""
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view(labels.shape)
