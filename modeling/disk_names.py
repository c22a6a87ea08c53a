"""Under which names a model's parameters lie in the files that transformers writes and other tools read.

A few architectures keep their parameters under other names, or several in one, than the files of the hub have them.
`from_pretrained` takes either; servers and converters often only the files' form.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def on_disk(model: PreTrainedModel, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors by name that stand for one parameter in a file. `value` may be on the meta device."""
    return dict(revert_weight_conversion(model, {name: value}))


def converts_alone(model: PreTrainedModel, parameters: Mapping[str, torch.Tensor]) -> bool:
    """Whether each parameter can be written by itself. parameters: all of them, on the meta device.

    False where a file's tensor is made of several parameters: such a model is written under the names it has.
    """
    try:
        together = set(revert_weight_conversion(model, dict(parameters)))
        apart = {key for name, value in parameters.items() for key in on_disk(model, name, value)}
    except Exception:  # transformers raises what its single operations raise
        return False
    return together == apart


def names_of_the_same(model: PreTrainedModel, name: str, shape: torch.Size) -> tuple[str, ...]:
    """The names under which a file may have this parameter value for value, not in pieces nor transposed."""
    probe = torch.arange(shape.numel()).view(shape)
    try:
        pieces = on_disk(model, name, probe)
    except Exception:  # as above
        return ()
    return tuple({name: None, **pieces}) if all(torch.equal(probe, piece) for piece in pieces.values()) else ()
