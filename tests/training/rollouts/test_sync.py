"""Settings that modules compute with, compared between sampler and trainer."""

from typing import Any

import torch

from training.rollouts.sync import _settings


class Rope(torch.nn.Module):
    """Rotary frequencies for each type of layer, as in Gemma 3."""

    def __init__(self, **kinds: str) -> None:
        super().__init__()
        self.rope_type, self.scaling = kinds, dict.fromkeys(kinds, 1.0)
        for name in kinds:
            self.register_buffer(name, torch.ones(4).cumsum(0))


def settings(**kinds: str) -> dict[str, Any]:
    return _settings(torch.nn.ModuleDict({"rope": Rope(**kinds)}))


def test_frequencies_by_type_of_layer_are_compared_unless_they_move() -> None:
    found = settings(local="default", whole="linear")
    assert found["rope.scaling"] == {"local": 1.0, "whole": 1.0}
    assert found["rope.local"] == found["rope.whole"] != 0
    assert not any(name.startswith("rope.") for name in settings(local="default", whole="dynamic"))


def test_a_model_without_buffers_has_numbers_alone() -> None:
    assert _settings(torch.nn.Sequential(torch.nn.LayerNorm(2)))["0.eps"] == 1e-5
