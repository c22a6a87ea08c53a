"""The names of a model's parameters in the files that transformers writes and other tools read.

A few architectures use different names in memory than in the hub's files, or merge several tensors into one.
`from_pretrained` accepts both forms; servers and converters often accept only that of the files.
"""

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def equivalent_names(model: PreTrainedModel, name: str, shape: torch.Size) -> tuple[str, ...]:
    """The names under which a file may hold this parameter unchanged, neither split nor transposed."""
    probe = torch.arange(shape.numel()).view(shape)
    try:
        pieces = revert_weight_conversion(model, {name: probe})
    except Exception:  # transformers raises whatever its conversion operations raise
        return ()
    return tuple({name: None, **pieces}) if all(torch.equal(probe, piece) for piece in pieces.values()) else ()
