"""How many tokens' logits are computed at a time: one rule for the trainer and for the planner."""

from __future__ import annotations

from config.schema_work import ModelSection

CHUNK_LOGITS = 2**26
"""[logits] Of one chunk, unless model.loss_chunk_tokens says otherwise: 256 MiB in FP32."""
AUTO_FROM_LOGITS = 2**22
"""[logits] Of a micro-batch, from which on model.loss = auto is chunked, be it one chunk. In FP32 the softmax over so
many and its gradients take 48 MiB, and more time than gradients made in place (docs/loss.md); below, as much."""
_MULTIPLE = 64
"""[tokens] Chunks are cut to what tensor cores like."""


def loss_chunk(model: ModelSection, *, tokens: int, vocabulary: int) -> int:
    """[tokens] In one chunk of the loss of a micro-batch of `tokens` tokens; 0: all logits at once."""
    if model.loss == "full" or (model.loss == "auto" and tokens * vocabulary < AUTO_FROM_LOGITS):
        return 0
    fitting = CHUNK_LOGITS // vocabulary // _MULTIPLE * _MULTIPLE
    return model.loss_chunk_tokens or max(fitting, _MULTIPLE)
