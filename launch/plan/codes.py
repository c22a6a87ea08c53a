"""Memory of a frozen base in 4 or 8 bits (`adapter.base`): codes, and the scales that bitsandbytes keeps in FP32.

NF4 has one scale per 64 weights (Dettmers et al. 2023, QLoRA); `double_quant` stores these scales in 8 bits, with one
FP32 scale per 256 of them. int8 has one scale per row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from config.schema import AdapterSection

_BLOCK, _SCALES = 64, 256
"""[weights] Number per scale, and [scales] number per scale of scales."""


@dataclass(frozen=True)
class Codes:
    """Sizes of the quantised layers."""

    parameters: int
    """[parameters] Number of weights that the codes represent."""
    codes: float
    """[bytes] Size of the codes, which stage 3 divides among ranks."""
    scales: float
    """[bytes] Size of the scales, which every rank holds in full."""
    largest: int
    """[parameters] Size of the largest layer, whose weights are dequantised while it computes."""


def coded_layers(model: Any, section: AdapterSection) -> list[Any]:
    """Layers to quantise in a model without its adapter: linear ones, except the head and fully trained modules."""
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
    """Sizes of `coded_layers`; None if the base is not quantised."""
    if section.base == "compute":
        return None
    shapes = [
        # GPT-2's weights are (inputs, outputs) and are transposed before quantisation
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
