"""Small models of several architectures in FP32, the same weights each time, and how far their gradients are apart."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 61
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 32, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "mixtral": {"num_local_experts": 4},
}


def small_model(family: str, attention: str = "sdpa", **config: Any) -> PreTrainedModel:
    """Two blocks of width 32 without dropout, unless `config` says otherwise."""
    torch.manual_seed(0)
    shape = AutoConfig.for_model(family, **SIZES | FAMILIES.get(family, {}) | config)
    return AutoModelForCausalLM.from_config(shape, attn_implementation=attention)


def distance(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """||found - exact|| / ||exact|| over all parameters together, in FP64."""
    squares = sum(float((found[name].double() - tensor.double()).square().sum()) for name, tensor in exact.items())
    return (squares / sum(float(tensor.double().square().sum()) for tensor in exact.values())) ** 0.5
