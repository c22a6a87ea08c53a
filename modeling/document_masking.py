"""Tests whether a model keeps documents apart that are packed into one sequence.

transformers derives where documents begin from `position_ids` and masks attention accordingly, for architectures that
build their mask with its `create_causal_mask`. Others accept the argument and silently attend across documents (OPT,
Falcon, Bloom), or have no attention to mask (Mamba). So the model is tested.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from transformers import PretrainedConfig, masking_utils

from config.errors import UserError

LARGEST_LEAK = 1e-3
"""[fraction] Largest change of the next document's logits, relative to the changed document's own, that is put down to
rounding in kernels whose summation order depends on their input. Models that keep documents apart show exactly 0 in
FP32 and BF16 on a CPU (Llama, Qwen3, Gemma 2, Mixtral, GPT-2, GPT-NeoX, Phi-3, GPT-J); the smallest change in others is
6e-3 (Bloom, BF16)."""
_LENGTHS = (6, 10)


def rows_of(inputs: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Context manager for a forward pass of `inputs`: rows are packed only if `inputs` has `position_ids`. transformers
    would find out by reading from the device in every pass, which makes the host wait."""
    if "position_ids" in inputs:
        return nullcontext()
    return patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)


@torch.no_grad()
def require_documents_apart(
    forward: Callable[[dict[str, Any]], torch.Tensor], config: PretrainedConfig, device: torch.device
) -> None:
    """Raise UserError unless changing the first of two packed documents leaves the second one's logits the same."""
    vocabulary = config.get_text_config().vocab_size
    first, length = _LENGTHS[0], sum(_LENGTHS)
    ids = torch.arange(length, device=device).unsqueeze(0) * 7 % vocabulary
    changed = ids.clone()
    changed[:, :first] = (ids[:, :first] + 1 + vocabulary // 2) % vocabulary
    positions = torch.cat([torch.arange(part, device=device) for part in _LENGTHS]).unsqueeze(0)
    before, after = (forward({"input_ids": one, "position_ids": positions}) for one in (ids, changed))
    moved = (after.float() - before.float()).abs().amax(dim=(0, 2))
    own, leaked = float(moved[:first].max()), float(moved[first:].max())
    if not leaked <= LARGEST_LEAK * own:
        raise UserError(
            f"data.packing or data.document_masking: {config.model_type} does not keep packed documents apart ("
            f"changing one moved the next one's logits by {leaked:.2g}, its own by {own:.2g}); set "
            "data.document_masking=false, and data.packing=none for rows, or use an architecture whose attention "
            "follows position_ids, such as llama, qwen3 or gpt2"
        )
