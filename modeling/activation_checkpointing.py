"""Recompute activations in the backward pass instead of keeping them (Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost").

Both implementations of torch are served through transformers: the reentrant one runs a nested backward per block, the
other one (the default) saves and restores through hooks and keeps the autograd graph of one pass.
"""

from __future__ import annotations

from typing import Literal

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from config.errors import UserError


def apply_activation_checkpointing(
    model: PreTrainedModel, mode: Literal["none", "full", "selective"], *, reentrant: bool
) -> int:
    """Switch it on and return how many transformer blocks are recomputed.

    full: every block. selective: every second block, counted from the first.

    Raises UserError when the architecture does not support it.
    """
    if mode == "none":
        return 0
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"model.activation_checkpointing = {mode}: {type(model).__name__} does not support it; set it to none"
        )
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    else:  # transformers before 5.20 or so
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if mode == "selective":
        for block in blocks[1::2]:
            block.gradient_checkpointing = False
    return sum(bool(block.gradient_checkpointing) for block in blocks)
