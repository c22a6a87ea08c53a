"""flash-attn's kernel as torch computes it on a CPU, for tests of what surrounds it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transformers.integrations.flash_attention as of_transformers
from torch.nn.functional import scaled_dot_product_attention


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """`flash_attention_2` computes causal attention in here, and takes 16 bits only."""

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *, softmax_scale: float, **how: Any
    ) -> torch.Tensor:
        """query, key, value: (batch, tokens, heads, head size)."""
        wanted = how["target_dtype"] or query.dtype  # as transformers casts them for autocast
        if wanted not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        given = (item.to(wanted).transpose(1, 2) for item in (query, key, value))
        return scaled_dot_product_attention(*given, is_causal=True, scale=softmax_scale, enable_gqa=True).transpose(
            1, 2
        )

    with mock.patch.object(of_transformers, "_flash_attention_forward", attend):
        yield
