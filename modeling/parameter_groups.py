"""Which parameters the optimizer decays."""

from __future__ import annotations

from typing import Any

import torch


def parameter_groups(model: torch.nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups: matrices that decay, and norms, biases and embeddings, which do not.

    A parameter shared by an embedding and an output head counts as an embedding. Frozen parameters are left out.
    Shapes are read from `ds_shape` where ZeRO-3 has already partitioned a parameter to an empty tensor.
    """
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
        (plain if dimensions < 2 or id(parameter) in embeddings else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
