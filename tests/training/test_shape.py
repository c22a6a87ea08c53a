"""A model that cannot be built is one line with key and value, before its data are prepared."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config.errors import UserError
from config.load import load_config
from training.tasks.shape import require_model, settle_orthogonalization

LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4}


def require(folder: Path, architecture: str, given: dict[str, Any]) -> None:
    path = folder / "run.yaml"
    path.write_text("model: {architecture: llama}\n")
    config = load_config(path, [], None)
    require_model(replace(config, model=replace(config.model, architecture=architecture, config=given)))


@pytest.mark.parametrize(
    ("architecture", "usual", "key", "value", "said"),
    [
        (
            "llama",
            LLAMA,
            "hidden_size",
            65,
            "(The hidden size (65) is not a multiple of the number of attention heads (4))",
        ),
        ("llama", LLAMA, "num_key_value_heads", 3, "does not divide model.config.num_attention_heads = 4; change one"),
        ("llama", LLAMA, "num_hidden_layers", -1, "is not a valid size; give 1 or more"),
        ("llama", LLAMA, "hidden_act", "gellu", "no llama can be built with it (KeyError: 'gellu'); change it"),
        ("llama", LLAMA, "head_dim", 15, "RoPE requires an even rotary dimension"),
        ("llama", LLAMA, "pad_token_id", 1 << 20, "Padding_idx must be within num_embeddings"),
        ("llama", LLAMA, "attention_dropout", 1.5, "is not a probability; give 0 or more, and less than 1"),
        ("gpt2", GPT2, "n_embd", 65, "`embed_dim` must be divisible by num_heads"),
        ("gpt2", GPT2, "n_inner", -5, "is not a valid size; give 0 or more"),
        ("mixtral", LLAMA | {"num_local_experts": 2, "num_key_value_heads": 2}, "num_experts_per_tok", 4, "2 experts"),
    ],
)
def test_a_wrong_size_is_one_line(tmp_path, architecture, usual, key, value, said) -> None:
    require(tmp_path, architecture, usual)
    with pytest.raises(UserError) as caught:
        require(tmp_path, architecture, usual | {key: value})
    text = str(caught.value)
    assert text.startswith(f"model.config.{key} = ") and said in text and "\n" not in text


def test_a_key_of_older_versions_is_told_the_new_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rope_theta: .* no such key; set model.config.rope_parameters=") as caught:
        require(tmp_path, "llama", LLAMA | {"rope_theta": 1e6})
    assert "\n" not in str(caught.value)


def test_muon_orthogonalizes_in_bf16_on_gpus_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {architecture: llama}\noptimizer: {name: muon}\n")
    config = load_config(path, [], None)
    for on_gpu, chosen in ((True, "bf16"), (False, "fp32")):
        assert settle_orthogonalization(config, on_gpu=on_gpu).optimizer.orthogonalization == chosen
    told = replace(config, optimizer=replace(config.optimizer, orthogonalization="fp32"))
    assert settle_orthogonalization(told, on_gpu=True) is told
