"""The names of a model's parameters in the files that transformers writes and other tools read.

A few architectures have other names in memory than in the files of the hub, or merge several tensors into one.
`from_pretrained` takes either; servers and converters often only the files' form.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def on_disk(model: PreTrainedModel, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors, by name, that a file has for one parameter. `value` may be on the meta device."""
    return dict(revert_weight_conversion(model, {name: value}))


def equivalent_names(model: PreTrainedModel, name: str, shape: torch.Size) -> tuple[str, ...]:
    """The names under which a file may have this parameter value for value, not in pieces nor transposed."""
    probe = torch.arange(shape.numel()).view(shape)
    try:
        pieces = on_disk(model, name, probe)
    except Exception:  # as above
        return ()
    return tuple({name: None, **pieces}) if all(torch.equal(probe, piece) for piece in pieces.values()) else ()
