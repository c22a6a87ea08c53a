"""The analysis of tasks and families: kernels that cast by themselves, and activations that FP16 cannot hold."""

import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from tests.support.rows import labelled, seq2seq
from tests.support.rows.chats import SHAPE, write_base, write_chats
from tests.tools.analyze import analyze_cases
from tools.analyze.command import rejection_reason


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of each task, and encoders for the first."""
    made = tmp_path_factory.mktemp("analyzed")
    labelled.write_rows(made / "sequence.jsonl", "sequence", 60)
    seq2seq.write_rows(made / "rows.jsonl", 60)
    write_chats(made / "chats.jsonl", 60)
    labelled.write_encoder(made / "bert")
    labelled.write_encoder(made / "modernbert", "modernbert")
    seq2seq.write_model(made / "t5")
    return made


CASTS: dict[str, tuple[str, tuple[str, ...], set[str]]] = {
    # torch has no fused kernel on a CPU for dropout, nor for a bias that is trained
    "t5": ("seq2seq", (), {"SelfAttention"}),
    "bert with dropout": ("classify", ("model.config={attention_probs_dropout_prob: 0.1}",), {"self"}),
    "bert, eager": ("classify", ("model.config={attention_probs_dropout_prob: 0.1}", "model.attention=eager"), set()),
    "modernbert": ("classify", ("model.name_or_path={folder}/modernbert",), set()),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASTS)
def test_attention_that_computes_in_fp32_anyway_is_not_promised_16_bits(solo, folder, case) -> None:
    """The manifest that is proposed holds in a training step, which `verify` has judged."""
    task, overrides, casting = CASTS[case]
    given = tuple(item.replace("{folder}", str(folder)) for item in overrides)
    [found] = solo.run(analyze_cases.surveyed_task, folder=folder, task=task, overrides=given)
    result = found["result"]
    assert {name.rpartition(".")[2] for name in result["casts"]} >= casting
    assert bool(result["casts"]) == bool(casting)
    for name, by_dtype in result["casts"].items():
        assert by_dtype == {"bf16": "fp32", "fp16": "fp32"}
        choice = result["proposal"]["choices"][name]
        assert choice["compute"] == "fp32" and "computed in FP32: its module or kernel casts" in choice["reason"]
    assert found["finite"] and found["share"].get("fp16", 0) + found["share"].get("bf16", 0) > 0.5
    assert rejection_reason(result) is None


TRAPS: dict[str, tuple[str, str, float]] = {
    # the second linear layer of T5's blocks; the same of Gemma and Qwen, whose inputs are what grows
    "t5": ("decoder.block.1.layer.2.DenseReluDense.wo.weight", "decoder.block.1.layer.2.DenseReluDense.wo", 1e6),
    "gemma": ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj", 1e8),
    "qwen3": ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj", 1e8),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", TRAPS)
def test_activations_beyond_fp16_are_found_before_training(solo, folder, tmp_path, family) -> None:
    """A saved model whose feed-forward layers give values beyond 65,504, as pretrained ones of these families do.

    In FP16 it is not finite; the layer is proposed another dtype, and so is what lies between regions.
    """
    (weight, region, factor), task = TRAPS[family], "seq2seq" if family == "t5" else "sft"
    base = seq2seq.write_model(tmp_path / family) if family == "t5" else write_base(tmp_path / family, family)
    tensors = load_file(base / "model.safetensors")
    tensors[weight] *= factor
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    given = (f"model.name_or_path={base}",)
    [found] = solo.run(analyze_cases.surveyed_task, folder=folder, task=task, overrides=given)
    result: dict[str, Any] = found["result"]
    assert result["spreads"][region]["activations"]["maximum"] > 65504
    choice, manifest = result["proposal"]["choices"][region], result["proposal"]["manifest"]
    reasons = {
        "bf16": "leave no 16x headroom in FP16",
        "fp32": "of the FLOPs when in BF16",
    }  # FP32 where it is sensitive
    assert reasons[choice["compute"]] in choice["reason"]
    assert manifest["default"] in ("bf16", "fp32")
    assert math.isinf(result["validation"]["uniform fp16"]["error"])
    assert math.isfinite(result["validation"]["proposal"]["error"]) and found["finite"]


EMBEDDINGS = {
    "llama": "model.embed_tokens.weight",
    "gemma": "model.embed_tokens.weight",
    "gpt2": "transformer.wte.weight",
}
BEGIN = SHAPE.special[0]
PLANTED = (1.0, 2e4, 2e5)
"""The largest value of one token in the residual stream: of no account, without headroom in FP16, and beyond it."""


def planted(folder: Path, family: str, largest: float) -> Path:
    """A saved model in which the tokens that begin a turn have one large value in the residual stream."""
    base = write_base(folder / f"{family}-{largest:g}", family)
    tensors = load_file(base / "model.safetensors")
    scale = 32**0.5 if family == "gemma" else 1.0
    tensors[EMBEDDINGS[family]][PreTrainedTokenizerFast.from_pretrained(base).convert_tokens_to_ids(BEGIN), 0] = (
        largest / scale
    )
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    return base


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", EMBEDDINGS)
@pytest.mark.parametrize("value", PLANTED)
def test_no_proposal_is_worse_than_a_uniform_dtype(solo, folder, tmp_path, family, value) -> None:
    """FP16 competes only where all that it stores has headroom."""
    overrides = (f"model.name_or_path={planted(tmp_path, family, value)}",)
    [found] = solo.run(analyze_cases.surveyed_task, folder=folder, task="sft", overrides=overrides)
    result: dict[str, Any] = found["result"]
    peak = max(result["stored"]["activations"].values(), key=lambda peak: peak["value"])
    checked, uniform = result["validation"], result["uniform"]
    if value > 1.0:
        assert peak["value"] == pytest.approx(value, rel=0.01) and peak["token"] == BEGIN and peak["position"] == 0
        assert uniform != "fp16"
    assert (checked["uniform fp16"]["error"] == math.inf) == (value > 65504)
    assert (checked["uniform fp16"]["finite"] < 1) == (value > 65504)
    bearing = ["uniform bf16", *(["uniform fp16"] if peak["value"] * 16 <= 65504 else [])]
    chosen = checked[f"uniform {uniform}" if uniform else "proposal"]
    assert chosen["error"] <= min(checked[name]["error"] for name in bearing)
    assert uniform or chosen["error"] < 0.95 * min(checked[name]["error"] for name in bearing)
    manifest = result["proposal"]["manifest"]
    sixteen = {manifest["default"], *(rule["compute"] for rule in manifest["rules"])}
    assert ("loss_scale" in manifest) == ("fp16" in sixteen)


def test_fp16_that_no_loss_scale_helps_is_refused_with_its_layer(solo, folder, tmp_path) -> None:
    overrides = (f"model.name_or_path={planted(tmp_path, 'llama', 2e5)}",)
    given = {"folder": folder, "task": "sft", "overrides": overrides, "compute": "fp16"}
    [found] = solo.run(analyze_cases.surveyed_task, **given)
    assert found["hopeless"] == (
        f"precision.compute = fp16 cannot work: 200,000 at model.embed_tokens, token {BEGIN!r}, position 0, is beyond "
        "FP16's 65,504 whatever the loss scale; set precision.compute=bf16"
    )
