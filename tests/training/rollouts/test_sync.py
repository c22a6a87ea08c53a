"""Weights on their way to a sampler: settings that modules compute with are compared, adapters are merged."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from config.schema import AdapterSection
from modeling.adapter import wrapped_with_adapter
from training.rollouts.sync import _settings
from training.rollouts.vllm_sampler import VllmSampler

SIZES = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64, "num_local_experts": 4}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}


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


def test_a_server_gets_fused_experts_and_routers_with_their_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SIZES))
    wrapped = wrapped_with_adapter(base, AdapterSection(kind="lora", r=2), seed=0)
    for name, value in wrapped.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(value, std=0.05)
    sampler = VllmSampler.__new__(VllmSampler)
    monkeypatch.setattr(sampler, "model", wrapped.get_base_model(), raising=False)
    found = {name: value.clone() for name, value in sampler._whole().items()}
    merged = dict(wrapped.merge_and_unload().named_parameters())
    assert found.keys() == merged.keys()
    for name, value in merged.items():
        torch.testing.assert_close(found[name], value.detach())
