"""The memory of a frozen base in 4 or 8 bits (`adapter.base`): codes, and the scales that bitsandbytes keeps in FP32.

NF4 has a scale for each 64 weights (Dettmers et al. 2023, QLoRA); `double_quant` holds these in 8 bits, with a scale of
their own for each 256. int8 has one for each row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from config.schema import AdapterSection

_BLOCK, _SCALES = 64, 256
"""[weights] Number that share a scale, and [scales] number that share a scale of scales."""


@dataclass(frozen=True)
class Codes:
    """The layers that hold codes."""

    parameters: int
    """[parameters] Number of weights that they encode."""
    codes: float
    """[bytes] Size of the codes, divided by the ranks at stage 3."""
    scales: float
    """[bytes] Size of the scales, whole on every rank."""
    largest: int
    """[parameters] Size of the largest layer, whose weights are rebuilt while it computes."""


def coded_layers(model: Any, section: AdapterSection) -> list[Any]:
    """The layers of a model without its adapter that hold codes: linear, not the output nor trained whole."""
    head = model.get_output_embeddings()
    return [
        module
        for name, module in model.named_modules()
        if section.base != "compute"
        and type(module).__name__ in ("Linear", "Conv1D")
        and module is not head
        and not any(name.endswith(one) for one in section.modules_to_save)
    ]


def codes_of(model: Any, section: AdapterSection) -> Codes | None:
    """Sizes of `coded_layers`; None where the base is in floats."""
    if section.base == "compute":
        return None
    shapes = [
        # GPT-2's layers hold (inputs, outputs), which is turned before it is quantised
        tuple(layer.weight.shape[:: -1 if type(layer).__name__ == "Conv1D" else 1])
        for layer in coded_layers(model, section)
    ]
    sizes = [math.prod(shape) for shape in shapes]
    blocks = sum(math.ceil(size / _BLOCK) for size in sizes)
    rows = sum(shape[0] for shape in shapes)
    if section.base == "int8":
        codes, scales = float(sum(sizes)), 4.0 * rows
    elif section.double_quant:
        codes, scales = sum(sizes) / 2, blocks + 4.0 * sum(math.ceil(size / _BLOCK / _SCALES) for size in sizes)
    else:
        codes, scales = sum(sizes) / 2, 4.0 * blocks
    return Codes(sum(sizes), codes, scales, max(sizes, default=0))
