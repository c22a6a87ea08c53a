"""Parameters that decay or that Muon orthogonalizes, for the architectures of docs/models.md and unusual ones."""

import re

import pytest

from config.schema import ModelSection, OptimizerSection
from modeling.build import empty_model, model_config
from modeling.parameter_groups import group_of_each
from tests.support.models.architectures import CASES, Case
from tools.parity.oracle.optimizers import optimizer_of

_GROUPED = Case("", "").config
_WIDTH = {"hidden_size": 32, "num_hidden_layers": 2}
OTHERS = (
    Case("cohere", "norms of two dimensions", {**_GROUPED, "use_qk_norm": True}),
    Case("falcon_mamba", "Falcon Mamba", _WIDTH),
    Case("mamba2", "Mamba 2", {**_WIDTH, "num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8}),
    Case("jamba", "Jamba", {**_GROUPED, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1}),
    Case("zamba", "Zamba", {**_GROUPED, "num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2}),
    Case(
        "dbrx",
        "DBRX, all experts of a layer in one tensor of two dimensions",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}}
        | {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "hidden_size": 32}},
    ),
    Case("deepseek_v4", "hyper-connections", _GROUPED),
    Case("kimi_linear", "Kimi Linear, whose A_log has four dimensions", _GROUPED),
    Case("recurrent_gemma", "block-diagonal gates", {**_GROUPED, "lru_width": 32, "num_hidden_layers": 3}),
    Case("rwkv", "RWKV", _WIDTH),
    Case("jetmoe", "experts called input_linear", {**_GROUPED, "num_local_experts": 4, "kv_channels": 8}),
)
_LLAMA = "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"
_MOE = "experts.down_proj experts.gate_up_proj gate k_proj o_proj q_proj v_proj"
_NEOX = "dense dense_4h_to_h dense_h_to_4h query_key_value"
_MAMBA = "dt_proj in_proj out_proj x_proj"
_MLA = "down_proj experts.down_proj experts.gate_up_proj gate gate_proj"
CLASSES = {
    "gpt2": ("c_attn c_fc c_proj", ""),
    "gpt_neox": (_NEOX, "lm_head"),
    "opt": ("fc1 fc2 k_proj out_proj q_proj v_proj", ""),
    "bloom": (_NEOX, ""),
    "falcon": (_NEOX, ""),
    "starcoder2": ("c_fc c_proj k_proj o_proj q_proj v_proj", ""),
    "llama": (_LLAMA, "lm_head"),
    "mistral": (_LLAMA, "lm_head"),
    "mixtral": (_MOE, "lm_head"),
    "gemma": (_LLAMA, ""),
    "gemma2": (_LLAMA, ""),
    "gemma3_text": (_LLAMA, ""),
    "phi3": ("down_proj gate_up_proj o_proj qkv_proj", "lm_head"),
    "qwen2": (_LLAMA, "lm_head"),
    "qwen3": (_LLAMA, "lm_head"),
    "qwen3_moe": (_MOE, "lm_head"),
    "qwen3_next": (
        f"{_MOE} down_proj gate_proj up_proj in_proj_ba in_proj_qkvz out_proj shared_expert_gate",
        "conv1d lm_head",
    ),
    "olmo2": (_LLAMA, "lm_head"),
    "granite": (_LLAMA, "lm_head"),
    "cohere": (_LLAMA, ""),
    "smollm3": (_LLAMA, ""),
    "deepseek_v3": (f"{_MLA} kv_a_proj_with_mqa kv_b_proj o_proj q_a_proj q_b_proj up_proj", "lm_head"),
    "gpt_oss": ("experts.down_proj experts.gate_up_proj k_proj o_proj q_proj router v_proj", "lm_head"),
    "mamba": (_MAMBA, "conv1d"),
    "falcon_mamba": (_MAMBA, "conv1d"),
    "mamba2": ("in_proj out_proj", "conv1d lm_head"),
    "jamba": (f"{_LLAMA} {_MAMBA} experts.down_proj experts.gate_up_proj router", "conv1d lm_head"),
    "zamba": (f"{_LLAMA} in_proj linear out_proj", "conv1d mamba.dt_proj_weight mamba.x_proj_weight"),
    "dbrx": ("Wqkv layer out_proj", "lm_head mlp.v1 mlp.w1 mlp.w2"),
    "deepseek_v4": (f"{_MLA} kv_proj o_a_proj o_b_proj q_a_proj q_b_proj up_proj", "lm_head"),
    "kimi_linear": (f"{_MOE} down_proj gate_proj up_proj b_proj f_a_proj f_b_proj g_a_proj g_b_proj", "conv1d lm_head"),
    "recurrent_gemma": (
        f"{_LLAMA} linear_out linear_x linear_y",
        "conv_1d rg_lru.input_gate_weight rg_lru.recurrent_gate_weight",
    ),
    "rwkv": ("key output receptance value", "head"),
    "jetmoe": ("input_linear kv_proj layer output_linear", ""),
}
"""Architecture to what Muon takes, and to what only decays: the last two parts of names, without `weight`.

All else does neither, embeddings and the head that shares their weight among them.
"""
_NEVER = re.compile(r"norm|ln_|_ln|ln\d|emb|wte|wpe|bias|A_log|\.D$|dt_bias|sinks|scale|time_|recurrent_param|_hc|hc_")


@pytest.mark.parametrize("case", [*CASES, *OTHERS], ids=lambda case: f"{case.architecture} {case.name}")
def test_what_decays_and_what_muon_takes_is_what_layers_multiply_their_inputs_by(case):
    section = ModelSection(architecture=case.architecture, config=case.config)
    model = empty_model(section, model_config(section, vocab_size=64, sequence_length=32))
    optimizer = OptimizerSection(name="muon", weight_decay=0.3)
    groups, by_oracle = group_of_each(model, optimizer), optimizer_of(model, optimizer).param_groups
    oracle = {id(p): (group["matrix"], group["weight_decay"]) for group in by_oracle for p in group["params"]}
    found: dict[tuple[bool, float], set[str]] = {}
    for name, parameter in model.named_parameters():
        group = groups[id(parameter)]["matrix"], groups[id(parameter)]["weight_decay"]
        assert group == oracle[id(parameter)], f"{name}: the parity check has another"
        parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdigit()]
        raw = not name.endswith(".weight")
        found.setdefault(group, set()).add(".".join(parts[-2:] if raw else parts[-1:]))
    assert found.keys() <= {(True, 0.3), (False, 0.3), (False, 0.0)}
    matrices, decayed = (set(names.split()) for names in CLASSES[case.architecture])
    assert found[True, 0.3] == matrices
    assert found.get((False, 0.3), set()) == decayed
    assert [name for name in matrices | decayed if _NEVER.search(name)] == []
    assert [name for name in found[False, 0.0] if not _NEVER.search(name)] == []
