"""Dequantises a 4-bit or 8-bit base into plain layers, for references, oracles and merges."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from modeling.quantised_base import quantised_layers


@torch.no_grad()
def dequantise(model: PreTrainedModel, *, computed_in: torch.dtype = torch.float32) -> list[str]:
    """Replace quantised layers, in place, by plain ones with the dequantised weights in FP32.

    computed_in: dtype that the weights are rounded to first. Returns the layers' names.
    """
    layers = quantised_layers(model)
    for name, layer in layers.items():
        plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain.weight = torch.nn.Parameter(layer.rebuilt(computed_in).float(), requires_grad=False)
        if layer.bias is not None:
            plain.bias = layer.bias
        model.set_submodule(name, plain)
    for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit"):
        model.__dict__.pop(flag, None)
    return list(layers)
