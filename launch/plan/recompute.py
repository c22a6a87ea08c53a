"""What activation checkpointing leaves of a block's activations, and how much of a forward pass it repeats."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from launch.plan.model import Shape

if TYPE_CHECKING:
    from launch.plan.layout import Layout


def attention_bytes(shape: Shape, layout: Layout) -> float:
    """[bytes] Of one token in one block, what its attention saves beside its input, which is the norm's output."""
    if shape.counted is not None:
        return shape.counted.attention - layout.width * shape.hidden
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = layout.width * (2 * queries + 2 * keys)
    if layout.sharing > 1:  # what goes into the output's projection is another tensor than what attention made
        attention += layout.width * (queries + 2 * keys * (shared_copies(shape, layout) - 1))
    if layout.masked and layout.attention != "eager":  # keys and values of all heads, and each layer's own mask
        copies = shared_copies(shape, layout)
        attention += layout.width * (2 * (queries - copies * keys) + layout.sequence * layout.sharing)
    if shape.head_norms:
        attention += (4 + layout.width) * (queries + keys) + 4 * (shape.heads + shape.kv_heads)
    if layout.attention == "eager":
        attention += (4 if layout.width == 4 else 6) * shape.heads * layout.sequence
    else:
        attention += 4 * shape.heads
    return float(attention)


def shared_copies(shape: Shape, layout: Layout) -> int:
    """How often key and value heads are repeated, so that ranks that share sequences can have equally many."""
    return math.lcm(shape.kv_heads, layout.sharing) // shape.kv_heads


def kept_bytes(shape: Shape, layout: Layout, block: float) -> tuple[float, float]:
    """(kept, recomputed) bytes of one micro-batch: of all blocks until backward, and of the block it recomputes.

    block: bytes of one block of which nothing is recomputed.
    """
    tokens = layout.tokens
    edge = float(layout.width * shape.hidden * layout.block_tokens)
    if layout.checkpointing == "attention":
        again = attention_bytes(shape, layout) * tokens
        return shape.layers * (block - again), again
    if layout.checkpointing == "ops":
        kept = edge + _matmul_bytes(shape, layout) * tokens
        return shape.layers * kept, max(block - kept, 0.0)
    number = recomputed_blocks(shape, layout, block)
    return (shape.layers - number) * block + number * edge, block if number else 0.0


def outside_bytes(shape: Shape, layout: Layout) -> float:
    """[bytes] Of one token that are kept outside of the blocks, without the logits: for the last norm, as a rule."""
    if shape.counted is not None:
        return shape.counted.outside
    return float(((4 + 2 * layout.width) if shape.rms_norm else 2 * layout.width) * shape.hidden)


def recomputed_blocks(shape: Shape, layout: Layout, block: float) -> int:
    """[blocks] That are recomputed as a whole. For budget the fewest that fit, as the trainer finds them by counting.

    Of the loss the trainer counts what stays until the backward pass: FP32 log-softmax, or gradients of chunks.
    """
    model, layers, tokens = layout.model, shape.layers, layout.tokens
    if layout.checkpointing == "budget":
        loss = min(4.0 * shape.vocabulary * tokens, 4.0 * shape.hidden * (shape.vocabulary + tokens))
        room = (model.activation_memory_gib or 0.0) * 2**30 - outside_bytes(shape, layout) * tokens - loss
        edge = layout.width * shape.hidden * tokens
        return next((n for n in range(layers) if (layers - n) * block + n * edge <= room), layers)
    return {"selective": -(-layers // model.checkpointing_every), "full": layers}.get(layout.checkpointing, 0)


def recomputed_share(shape: Shape, layout: Layout, block: float) -> float:
    """[fraction] Of a forward pass's matmul FLOPs that the backward pass repeats."""
    if layout.checkpointing not in ("attention", "ops"):
        return recomputed_blocks(shape, layout, block) / shape.layers
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    scores = shape.attention_flops(layout.sequence) / shape.layers  # QK^T and PV
    if layout.checkpointing == "ops":
        again = scores if layout.attention == "eager" else 0.0
    else:
        again = scores + 2.0 * shape.hidden * 2 * (queries + keys)
    return shape.layers * again / shape.forward_flops(layout.sequence)


def _matmul_bytes(shape: Shape, layout: Layout) -> float:
    """[bytes] Of one token in one block, the results of its matmuls and of fused attention."""
    if shape.counted is not None:
        return shape.counted.matmuls
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mlp = (2 if shape.gated else 1) * shape.intermediate + shape.hidden
    fused = 0 if layout.attention == "eager" else layout.width * queries + 4 * shape.heads
    return float(layout.width * (queries + 2 * keys + shape.hidden + mlp) + fused)
