"""FlexAttention by its definition, in plain torch and any dtype: the reference for its compiled kernel.

The kernel neither computes FP32 products in FP32 (on a GPU they are TF32 by default) nor supports FP64, and is compiled
for each dtype. Here scores and softmax are computed in FP32, or in FP64 for FP64, and the probabilities are rounded
once to the values' dtype, as in torch's own formulas (`math_attention` in its higher-order operators). So is the
backward pass (`sdpa_dense_backward`, and the kernel): gradients of the scores come from the rounded output, and are
rounded themselves before the products with queries and keys. sdpa is no substitute: it takes no `score_mod`, and rounds
in other places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import transformers.integrations.flex_attention as of_transformers
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import AuxOutput, BlockMask, _vmap_for_bhqkv


@contextmanager
def plain_flex(module: torch.nn.Module) -> Iterator[None]:
    """Context manager: a module with FlexAttention computes it in plain torch; any other module is unchanged."""
    if getattr(getattr(module, "config", None), "_attn_implementation", None) != "flex_attention":
        yield
        return
    with patch.object(of_transformers, "WrappedFlexAttention", lambda training: lambda: flex_attention):
        yield


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    score_mod: Callable[..., torch.Tensor],
    block_mask: BlockMask | None,
    scale: float | None,
    return_aux: Any = None,
    **_: Any,
) -> Any:
    """Counterpart of torch's: (batch, heads, queries, width) in the query's dtype, and log sums with `return_aux`.

    query: (batch, heads, queries, width). key, value: (batch, heads or a divisor of them, keys, width).
    """
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    key, value = (item.repeat_interleave(query.shape[1] // item.shape[1], dim=1) for item in (key, value))
    scores = query.to(wide) @ key.to(wide).transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = _Rounded.apply(scores, query.dtype)
    places = [torch.arange(size, device=query.device) for size in scores.shape]
    with TransformGetItemToIndex():
        scores = _vmap_for_bhqkv(score_mod, prefix=(0,))(scores, *places)
        seen = None if block_mask is None else _vmap_for_bhqkv(block_mask.mask_mod, prefix=())(*places)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    output, sums = _Chosen.apply(scores, value)
    return output if return_aux is None else (output, AuxOutput(lse=sums))


class _Rounded(torch.autograd.Function):
    """The identity, whose gradient is rounded to a dtype."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        context.dtype = dtype
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, *came: torch.Tensor) -> tuple[torch.Tensor, None]:
        return came[0].to(context.dtype).to(came[0].dtype), None


class _Chosen(torch.autograd.Function):
    """Values weighted by the softmax of scores, and the logarithm of its sums, differentiated as in the kernel."""

    @staticmethod
    def forward(context: Any, scores: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums = scores.logsumexp(-1, keepdim=True)
        chosen = torch.where(sums.isneginf(), 0.0, (scores - sums).exp())  # for a query that sees nothing
        output = chosen.to(value.dtype) @ value
        context.save_for_backward(chosen, value, output)
        return output, sums.squeeze(-1)

    @staticmethod
    def backward(context: Any, *came: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (chosen, value, output), (of_output, of_sums) = context.saved_tensors, came
        of_value = chosen.to(value.dtype).transpose(2, 3) @ of_output
        wide = of_output.to(chosen.dtype)
        shared = (output.to(chosen.dtype) * wide).sum(-1, keepdim=True) - of_sums.unsqueeze(-1)
        return chosen * (wide @ value.to(chosen.dtype).transpose(2, 3) - shared), of_value
