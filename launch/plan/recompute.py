"""Activations that remain of a block under checkpointing, and the share of a forward pass that is recomputed."""

from launch.plan.layout import Layout
from launch.plan.model import Shape


def kept_bytes(shape: Shape, layout: Layout) -> tuple[float, float]:
    """(kept, recomputed) bytes of one micro-batch: of all blocks until backward, and of the block being recomputed."""
    assert shape.counted is not None
    tokens, block, edge = layout.tokens, block_bytes(shape, layout), _edge(shape, layout)
    if layout.checkpointing == "attention":
        again = (shape.counted.attention - layout.width * shape.hidden) * tokens
        return shape.layers * (block - again), again
    if layout.checkpointing == "ops":
        kept = edge + shape.counted.matmuls * tokens
        return shape.layers * kept, max(block - kept, 0.0)
    number = recomputed_blocks(shape, layout)
    return (shape.layers - number) * block + number * edge, block if number else 0.0


def block_bytes(shape: Shape, layout: Layout) -> float:
    """[bytes] Size of one block's activations without recomputation."""
    assert shape.counted is not None
    return shape.counted.block * layout.tokens + shape.counted.weights


def _edge(shape: Shape, layout: Layout) -> float:
    """[bytes] Size of a block's input."""
    return float(layout.width * shape.hidden * layout.block_tokens)


def recomputed_blocks(shape: Shape, layout: Layout) -> int:
    """[blocks] Number recomputed as a whole; for a budget the smallest number that fits, computed as by the trainer.
    The trainer includes what the loss keeps until the backward pass: FP32 log-softmax, or gradients of chunks."""
    model, layers, tokens = layout.config.model, shape.layers, layout.tokens
    if layout.checkpointing == "budget":
        assert shape.counted is not None
        loss = min(4.0 * shape.vocabulary * tokens, 4.0 * shape.hidden * (shape.vocabulary + tokens))
        room = (model.activation_memory_gib or 0.0) * 2**30 - shape.counted.outside * tokens - loss
        block, edge = block_bytes(shape, layout), _edge(shape, layout)
        return next((n for n in range(layers) if (layers - n) * block + n * edge <= room), layers)
    return {"selective": -(-layers // model.checkpointing_every), "full": layers}.get(layout.checkpointing, 0)


def recomputed_share(shape: Shape, layout: Layout) -> float:
    """[fraction] Share of the forward pass's matmul FLOPs that is recomputed in the backward pass."""
    if layout.checkpointing not in ("attention", "ops"):
        return recomputed_blocks(shape, layout) / shape.layers
    queries, keys = shape.widths()
    scores = shape.attention_flops(layout.sequence) / shape.layers  # QK^T and PV
    if layout.checkpointing == "ops":
        again = scores if shape.attention == "eager" else 0.0
    else:
        again = scores + 2.0 * shape.hidden * 2 * (queries + keys)
    return shape.layers * again / shape.forward_flops(layout.sequence)
