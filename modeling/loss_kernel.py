"""A Triton kernel for the softmax of the chunked loss: losses and gradient of a chunk of logits in one launch.

torch's operators take ten passes over a chunk in FP32. Here each logit is read twice and overwritten once by its
gradient, in the dtype of the matmul that produced it; in between everything is FP32, as with torch's operators. Each
program handles one token, so a token's terms are summed in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from config.errors import one_line
from modeling.linear_cross_entropy import IGNORED

_BLOCK = 4096
"""[logits] Number held by a program at a time."""
_ERROR = 1e-5
"""Relative error allowed in the losses, for sums in a different order."""


@triton.jit
def softmax_gradient(  # type: ignore[no-untyped-def]  # Triton evaluates annotations
    logits,
    labels,
    factors,
    every,
    losses,
    columns,
    stride,
    scale,
    cap,
    CAPPED: tl.constexpr,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    counts = label != IGNORED
    largest = -3.0e38  # not -inf, from which a block of -inf would make NaN
    total = 0.0
    of_label = 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        x = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32) * scale
        if CAPPED:
            x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)
        x = tl.where(inside, x, float("-inf"))
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        of_label += tl.sum(tl.where(at == label, x, 0.0), 0)
        largest = larger
    tl.store(losses + row, tl.where(counts, tl.log(total) - (of_label - largest), 0.0))
    factor = tl.load(factors + row * every).to(tl.float32) * scale * counts.to(tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        x = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32) * scale
        slope = 1.0
        if CAPPED:
            bent = 2 * tl.sigmoid(2 * x / cap) - 1
            x = cap * bent
            slope = 1 - bent * bent
        gradient = tl.exp(x - largest) / total - tl.where(at == label, 1.0, 0.0)
        tl.store(logits + at, (gradient * slope * factor).to(logits.dtype.element_ty), mask=inside)


def fused_softmax(
    logits: torch.Tensor, labels: torch.Tensor, factors: torch.Tensor, *, scale: float, cap: float | None
) -> torch.Tensor:
    """(tokens,) FP32 losses of a chunk. Overwrites `logits` with their gradient, times `factors`. logits: (tokens,
    vocabulary), FP32 or narrower, before scale and cap. labels: (tokens,) int64. factors: (tokens,)."""
    losses = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
    given: list[Any] = [logits, labels, factors, factors.stride(0), losses]
    given += [logits.shape[1], logits.stride(0), scale, cap or 1.0]
    softmax_gradient[(len(labels),)](*given, CAPPED=cap is not None, IGNORED=IGNORED, BLOCK=_BLOCK, num_warps=8)
    return losses


def kernel_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel fails to compute cross-entropy of a few random logits on this device; None if it succeeds."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(8, 5000, generator=generator)).to(device, dtype)
    labels = torch.arange(8, device=device)
    wide = logits.clone().float().requires_grad_()
    exact = torch.nn.functional.cross_entropy(wide, labels, reduction="none")
    (gradient,) = torch.autograd.grad(exact.sum(), wide)
    exact = exact.detach()
    try:
        losses = fused_softmax(logits, labels, torch.ones(8, device=device), scale=1.0, cap=None)
    except Exception as problem:  # whatever Triton and its compiler may raise
        return f"it cannot run: {one_line(problem, 200)}"
    error = float((losses - exact).norm() / exact.norm())
    if not error <= _ERROR:
        return f"its losses are {error:.1e} away from torch's"
    error, allowed = float((logits.float() - gradient).norm() / gradient.norm()), _ERROR + torch.finfo(dtype).eps
    return None if error <= allowed else f"its gradient is {error:.1e} away from torch's, more than {allowed:.1e}"
