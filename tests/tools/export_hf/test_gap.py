"""The train-inference gap equals an independent computation, and a wrong export is found and named."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from config.load import to_yaml
from config.task import CAUSAL_LM
from tests.support.models.small_models import small_model
from tests.support.rows.chats import write_base, write_chats
from tests.training.tasks.sft_cases import resolve
from tools.export_hf.gap import Bounds, GapTooLarge, measure, of_masters, require_within, row_gap
from tools.export_hf.rows import Row, rows_of_data
from training.checkpoint.partitions import SavedModel, SavedTensor


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with its tokenizer, and chats."""
    made = tmp_path_factory.mktemp("chats")
    write_base(made / "base")
    write_chats(made / "chats.jsonl", 12)
    write_chats(made / "others.jsonl", 5, seed=1)
    return made


def ids_of(row: Row) -> torch.Tensor:
    ids: torch.Tensor = row.inputs["input_ids"][0]
    return ids


def test_rows_are_those_of_the_data_that_is_named(chats: Path) -> None:
    """A file as the run reads its own, without its validation sets, or the data of another config; one tokenizer."""
    sets = f"data.validation=[{{path: {chats}/chats.jsonl, format: messages}}]"
    config = resolve(chats, overrides=("data.packing=none", sets)).config
    tokenizer = AutoTokenizer.from_pretrained(chats / "base")
    of_file = rows_of_data(str(chats / "others.jsonl"), config, chats / "base", 3)
    whole = [json.loads(line)["messages"] for line in (chats / "others.jsonl").read_text().splitlines()]
    texts = {tokenizer.apply_chat_template(turns, tokenize=False) for turns in whole}
    assert len(of_file) == 3
    assert {tokenizer.decode(ids_of(row)) for row in of_file} <= texts
    written = yaml.safe_load(to_yaml(config)) | {"task": "sft"}
    written["data"] |= {"path": str(chats / "others.jsonl"), "tokenizer": "bytes", "validation": []}
    (chats / "other.yaml").write_text(yaml.safe_dump(written))
    of_config = rows_of_data(str(chats / "other.yaml"), config, chats / "base", 5)
    assert {tokenizer.decode(ids_of(row)) for row in of_config} == texts


def test_a_text_file_is_read_whatever_separated_the_run_s_documents(chats: Path) -> None:
    config = resolve(chats, overrides=("data.packing=none",)).config
    split = replace(config, data=replace(config.data, document_separator="\n==\n"))
    (chats / "plain.txt").write_text("some words " * 40)
    assert len(rows_of_data(str(chats / "plain.txt"), split, chats / "base", 1)) == 1


SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
CAUSAL: dict[str, Any] = {"model_class": CAUSAL_LM, "trust_remote_code": False}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


@pytest.fixture(scope="module")
def exact() -> Any:
    """The masters, with logits of a trained model's size: at the start they are all near 0."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, initializer_range=0.1)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Rows of different lengths, one longer than a chunk."""
    generator = torch.Generator().manual_seed(1)
    return [Row.of_text(torch.randint(300, (length,), generator=generator)) for length in (100, 3, 20)]


def exported(exact: Any, folder: Path, dtype: torch.dtype) -> Path:
    """The masters, rounded."""
    model = LlamaForCausalLM(exact.config)
    model.load_state_dict(exact.state_dict())
    model.to(dtype).save_pretrained(folder)
    return folder


def plain(model: Any, row: Row) -> torch.Tensor:
    """Log-probabilities in FP64 by their definition."""
    with torch.no_grad():
        logits = model(input_ids=ids_of(row)[None]).logits[0].double()
    return logits - logits.exp().sum(dim=-1, keepdim=True).log()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gap_is_that_of_the_definition(exact: Any, rows: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    found = measure(exact, exported(exact, tmp_path, dtype), rows, **CAUSAL)
    for compute, facts in ((dtype, found), (torch.float32, found["of rounding alone"])):
        model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=compute).eval()
        pairs = [(plain(exact, row), plain(model, row)) for row in rows]
        kl = [(p.exp() * (p - q)).sum(dim=-1) for p, q in pairs]
        difference = [(p - q).abs().amax(dim=-1) for p, q in pairs]
        assert facts["kl"] == pytest.approx(float(torch.cat(kl).mean()), rel=1e-6)
        assert facts["largest kl"] == pytest.approx(float(torch.cat(kl).max()), rel=1e-6)
        assert facts["largest difference"] == pytest.approx(float(torch.cat(difference).max()), rel=1e-6)
        if facts is found:
            follow = [
                (p - q).abs()[:-1].gather(1, ids_of(row)[1:, None]) for (p, q), row in zip(pairs, rows, strict=True)
            ]
            assert facts["largest difference of the row's tokens"] == pytest.approx(float(torch.cat(follow).max()))
            worst = max(range(3), key=lambda number: float(kl[number].max()))
            assert facts["worst"] == {"row": worst, "position": int(kl[worst].argmax())}
            assert list(facts["by position"]) == ["0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64-99"]
            assert facts["by position"]["2-3"]["kl"] == pytest.approx(float(torch.cat([k[2:4] for k in kl]).mean()))
            assert facts["by position"]["64-99"]["largest difference"] == pytest.approx(float(difference[0][64:].max()))
    assert found["tokens"] == 123
    assert 0 < found["of rounding alone"]["kl"] < found["kl"] < 0.1


def test_a_token_that_one_model_rules_out_is_a_gap_that_is_not_finite() -> None:
    logits = torch.zeros(1, 2, 3)
    other = logits.clone()
    other[0, 1, 2] = -math.inf
    exact, found = (lambda value=value, **given: SimpleNamespace(logits=value) for value in (logits, other))
    gap = row_gap(exact, found, Row.of_text(torch.tensor([0, 1])))
    assert gap.kl.tolist() == gap.difference.tolist() == [0, math.inf]


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma3_text", "mixtral"])
def test_the_masters_model_is_the_architecture_s_own(rows: Any, tmp_path: Path, family: str) -> None:
    """Buffers, tied weights and scaled embeddings included: an FP32 export computes the same to the last bit."""
    model = small_model(family).eval()
    model.save_pretrained(tmp_path)
    tensors = {name: SavedTensor(value.shape, value.detach().clone) for name, value in model.named_parameters()}
    saved = SavedModel(stage=2, ranks=1, tensors=tensors)
    masters = of_masters(saved, AutoConfig.from_pretrained(tmp_path), **CAUSAL)
    short = [Row.of_text(ids_of(row)[:30] % 61) for row in rows]
    found = measure(masters, tmp_path, short, **CAUSAL)
    assert found["largest kl"] == found["largest difference"] == 0
    require_within(found, Bounds(kl=0.0, difference=0.0))
    assert all(entry["own error"] == 0 for entry in found["modules"])
    model.bfloat16().save_pretrained(tmp_path)
    half = measure(masters, tmp_path, short, **CAUSAL)
    assert half["kl"] == half["of the masters rounded"]["kl"] > 0


def coarse(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.float8_e4m3fn).to(weight.dtype)


def in_bf16(weight: torch.Tensor) -> torch.Tensor:
    return weight.bfloat16().float()


def not_finite(weight: torch.Tensor) -> torch.Tensor:
    return weight * math.nan


@pytest.mark.parametrize(
    ("dtype", "module", "damage"),
    [
        (torch.bfloat16, "model.layers.1.self_attn.v_proj", coarse),
        (torch.bfloat16, "model.layers.0.mlp.down_proj", coarse),
        (torch.float32, "model.layers.1.post_attention_layernorm", in_bf16),
        (torch.float32, "model.layers.0.mlp.up_proj", in_bf16),
        (torch.bfloat16, "model.layers.0.input_layernorm", not_finite),
    ],
)
def test_a_wrong_weight_is_found_and_named(
    exact: Any, rows: Any, tmp_path: Path, dtype: torch.dtype, module: str, damage: Any
) -> None:
    good = measure(exact, exported(exact, tmp_path, dtype), rows, **CAUSAL)
    require_within(good, bounds := Bounds(kl=1.5 * good["largest kl"]))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{module}.weight"] = damage(tensors[f"{module}.weight"])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    wrong = measure(exact, tmp_path, rows, **CAUSAL)
    assert wrong["modules"][0]["module"] == module
    assert wrong["largest kl"] > 1.5 * good["largest kl"]
    with pytest.raises(GapTooLarge, match=re.escape(f"{module} has the largest error of its own")):
        require_within(wrong, bounds)
    with pytest.raises(GapTooLarge):
        require_within(wrong, Bounds())  # also without a bound of its own
    if damage is not_finite:
        with pytest.raises(GapTooLarge, match="is not finite"):
            require_within(wrong, Bounds())
