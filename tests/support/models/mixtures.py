"""Small mixtures of experts of every architecture of transformers that has them."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto import modeling_auto

from tests.support.models.small_models import SIZES

EXPERTS, TAKEN = 6, 2
"""No other size of these models is EXPERTS, so that logits of routers are known by their shape."""
EACH = SIZES | {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": TAKEN, "head_dim": 8}
EACH |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "pad_token_id": 0}
"""Keys that most architectures take."""
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_LINEAR |= {
    f"linear_{key}": value for key, value in (("num_key_heads", 2), ("num_value_heads", 2), ("key_head_dim", 8))
}
_LINEAR["linear_value_head_dim"] = 8
MORE: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["full_attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0, "use_mamba_kernels": False},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_next": _LINEAR,
}
"""Further keys of single ones."""
_FULL = {"layer_types": ["full_attention"] * 2}
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
"""Keys of Qwen 4's attention."""
_ROUTED = {"n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS, "moe_topk": TAKEN, "moe_k": TAKEN}
_ROUTED |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0, "num_dense_layers": 0}
_ROUTED |= {"mlp_layer_types": ["sparse"] * 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
_ROUTED |= {"qk_nope_head_dim": 8, "v_head_dim": 16}
_WIDE = {"num_key_value_heads": 4}
_OTHERS: dict[str, dict[str, Any]] = {
    "axk2": _WIDE,
    "bailing_hybrid": _FULL,
    "dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 2}
    | {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}}
    | {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": EXPERTS, "moe_top_k": TAKEN, "hidden_size": 32}},
    "deepseek_v32": _WIDE,
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]},
    "doge": {"is_moe": True, "num_experts": (EXPERTS // 2) ** 2},
    "dots3_note_text": _WIDE,
    "flint": {"mlp_only_layers": []},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": TAKEN, "hidden_size_per_layer_input": 0}
    | {"vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0, "global_head_dim": 8},
    "glm_moe_dsa": _WIDE,
    "inkling_text": dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), EXPERTS - 2)
    | {"n_shared_experts": 2, "layer_types": ["hybrid"] * 2}
    | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8},
    "kimi_linear": _FULL | {"linear_head_dim": 8, "linear_num_heads": 2},
    "lfm2_moe": _FULL,
    "longcat_flash": {"num_layers": 1, "zero_expert_num": 0, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16},
    "mistral4": _WIDE | {"head_dim": 16},
    "nllb-moe": {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    | {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in (("layers", 2), ("ffn_dim", 48))}
    | {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "qwen4_exp_text": _LINEAR | _INDEXER | {"indexer_compress_ratio": 2},
    "switch_transformers": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2}
    | {"num_heads": 4, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
    "zaya": {"num_experts_per_tok": 1, "num_experts": EXPERTS - 1},
}


_TASKS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION")


def sources(mapping: dict[str, str]) -> dict[str, str]:
    """The modeling code of each architecture of one of transformers' mappings to classes, such as causal models."""
    found = {}
    for kind in mapping:
        config = CONFIG_MAPPING[kind].__module__
        spec = importlib.util.find_spec(config.replace(".configuration_", ".modeling_"))
        if spec and spec.origin:
            found[kind] = Path(spec.origin).read_text(encoding="utf-8")
    return found


def with_experts() -> dict[str, Any]:
    """Every architecture with experts that a task can train, to a class of transformers that builds it. Those with
    parts beside the text have the routers of their text model."""
    found = {}
    for mapping in _TASKS:
        for kind, source in sources(getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")).items():
            if "Experts(" in source or "MoE(" in source:
                found.setdefault(kind, getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING"))
    return {kind: classes for kind, classes in found.items() if "text_config" not in CONFIG_MAPPING[kind].sub_configs}


def keys_of(kind: str) -> dict[str, Any]:
    """Keys for a small model of `kind`, among them some that it does not have."""
    return EACH | _ROUTED | MORE.get(kind, {}) | _OTHERS.get(kind, {})


def mixture(kind: str, classes: Any) -> Any:
    """A model of 2 layers or fewer with the experts of `kind` in FP32, in training mode. classes: of `with_experts`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **keys_of(kind))
    return classes[type(config)]._from_config(config).train()
