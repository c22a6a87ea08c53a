"""Healthy set-ups over all architectures of docs/models.md, 2 to 48 layers deep, at small rates and at high ones.

They are drawn from a seed, so that each list is another one and can be made again: what a sound run of any model that
trains is told by the gate. An alarm in one of them is a false one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from tests.support.models.architectures import CASES

COUNT, SEED = 200, 1
LAYERS = (2, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
RATES = (1e-6, 2e-5, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
_BY_MANIFEST = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "phi3")
"""Architectures whose modules a manifest of BF16 fits as it is."""


def drawn(count: int = COUNT, seed: int = SEED) -> list[tuple[str, tuple[str, ...], str, int]]:
    """Name, overrides, precision path and ZeRO stage of each set-up. Every architecture comes as often as any other."""
    dice, found = random.Random(seed), list[tuple[str, tuple[str, ...], str, int]]()
    for number in range(count):
        case = CASES[number % len(CASES)]
        layers, rate = dice.choice(LAYERS), dice.choice(RATES)
        paths = ("bf16", "fp16", "manifest") if case.architecture in _BY_MANIFEST else ("bf16", "fp16")
        overrides = (
            f"model.architecture={case.architecture}",
            f"model.config={json.dumps(_deeper(case.config, layers))}",
            f"optimizer.learning_rate={rate}",
        )
        name = f"{number} {case.architecture}, {layers} layers, rate {rate:g}"
        found.append((name, overrides, dice.choice(paths), dice.randint(1, 3)))
    return found


def _deeper(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    key = "n_layer" if "n_layer" in config else "num_hidden_layers"
    found = {**config, key: layers}
    if "layer_types" in config:  # in turns, as the small one has them
        kinds = config["layer_types"]
        found["layer_types"] = [kinds[layer % len(kinds)] for layer in range(layers)]
    return found
