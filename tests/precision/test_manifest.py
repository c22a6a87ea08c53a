"""The manifest: what the file may say, which rule wins, and what a mistake is told."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from config.cli import REPOSITORY
from config.schema import AdapterSection
from modeling.adapter import add_adapter
from precision.manifest import COMPUTES, Manifest, Rule, assign, find_regions, load_manifest
from tests.support.models.small_models import small_model
from tests.support.refusals import refused

EXAMPLES = sorted((REPOSITORY / "config" / "manifests").glob("*.json"))
SCHEMA = json.loads((REPOSITORY / "docs" / "manifest.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
RULE = {"match": "*.q_proj", "compute": "fp16", "reason": "range"}


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return small_model("llama")


def written(folder: Path, content: Any) -> Path:
    path = folder / "manifest.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def manifest(*rules: Rule, default: str = "bf16") -> Manifest:
    return Manifest(default, rules, Path("m.json"))


def rule(match: str | None, compute: str, module_class: str | None = None) -> Rule:
    return Rule(compute, f"{match} {module_class} {compute}", match, module_class)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_load_and_follow_the_schema(path: Path) -> None:
    loaded = load_manifest(path)
    tree = json.loads(path.read_text())
    VALIDATOR.validate(tree)
    assert (path.parent / tree.pop("$schema")).resolve() == REPOSITORY / "docs" / "manifest.schema.json"
    rules = [{key: value for key, value in asdict(item).items() if value is not None} for item in loaded.rules]
    assert {"default": loaded.default, "rules": rules} == tree


def test_there_is_an_example_with_all_three_dtypes(llama: torch.nn.Module) -> None:
    assigned = assign(load_manifest(REPOSITORY / "config" / "manifests" / "llama_mixed.json"), llama)
    assert assigned["model.layers.1.self_attn.k_proj"].compute == "fp16"
    assert assigned["model.layers.1.self_attn.v_proj"].compute == "bf16"
    assert (assigned["lm_head"].compute, assigned["lm_head"].rule_index) == ("fp32", 1)


def test_the_schema_knows_the_same_dtypes() -> None:
    assert tuple(SCHEMA["$defs"]["compute"]["enum"]) == COMPUTES


MISTAKES = [
    ({"defaults": "bf16"}, "defaults: no such key; did you mean default?"),
    ({"rules": []}, "default is missing"),
    ({"default": "bfloat16"}, "default = 'bfloat16' is not one of fp32, bf16, fp16, fp8; did you mean bf16?"),
    ({"default": "bf16", "rules": ["lm_head"]}, "rules[0] = 'lm_head' is not a mapping; it has the keys"),
    ({"default": "bf16", "rules": [{**RULE, "matches": "x"}]}, "rules[0].matches: no such key; did you mean"),
    ({"default": "bf16", "rules": [RULE, {"compute": "fp16", "reason": "r"}]}, "rules[1] says no module"),
    ({"default": "bf16", "rules": [{**RULE, "match": ""}]}, "rules[0].match = '' is empty"),
    ({"default": "bf16", "rules": [{**RULE, "reason": " "}]}, "rules[0].reason"),
    ({"default": "bf16", "rules": [{"match": "x", "compute": "fp16"}]}, "rules[0].reason is missing"),
    ([], "holds [] where a JSON object is expected"),
]


@pytest.mark.parametrize(("content", "told"), MISTAKES)
def test_a_mistake_is_one_line_and_breaks_the_schema_too(tmp_path: Path, content: Any, told: str) -> None:
    path = written(tmp_path, content)
    said = refused(load_manifest, path)
    assert told in said and said.startswith(f"{path}: ")
    assert not VALIDATOR.is_valid(content)


def test_a_missing_or_binary_file_is_told(tmp_path: Path) -> None:
    assert "cannot be read as a precision manifest" in refused(load_manifest, tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refused(load_manifest, tmp_path / "binary.json")


def test_the_last_match_wins(llama: torch.nn.Module) -> None:
    assigned = assign(manifest(rule("*_proj", "fp16"), rule("model.layers.0.*.q_proj", "fp32")), llama)
    first, second = assigned["model.layers.0.self_attn.q_proj"], assigned["model.layers.1.self_attn.q_proj"]
    assert (first.compute, first.rule_index, first.reason) == ("fp32", 1, "model.layers.0.*.q_proj None fp32")
    assert (second.compute, second.rule_index) == ("fp16", 0)
    assert (assigned["lm_head"].compute, assigned["lm_head"].rule_index) == ("bf16", None)


def test_fp8_is_for_the_base_of_an_adapter_unless_factors_are_named() -> None:
    """Other dtypes reach the base and both factors."""
    model = add_adapter(small_model("llama"), AdapterSection(kind="lora", r=2, target_modules=("q_proj",)), seed=0)
    layer = "model.layers.0.self_attn.q_proj"
    parts = [f"{layer}.{part}" for part in ("base_layer", "lora_A.default", "lora_B.default")]

    def given(*rules: Rule) -> list[str]:
        assigned = assign(manifest(*rules), model)
        return [assigned[name].compute for name in parts]

    assert given(rule("*.q_proj", "fp32")) == ["fp32"] * 3
    for match in ("*.layers.*_proj", "model.layers.*"):
        assert given(rule(match, "fp8", "Linear")) == ["fp8", "bf16", "bf16"]
    assert given(rule("*.q_proj", "fp32"), rule("*.q_proj", "fp8")) == ["fp8", "fp32", "fp32"]
    assert given(rule("*.lora_B.*", "fp8")) == ["bf16", "bf16", "fp8"]


def test_a_rule_that_later_ones_overrule_everywhere_is_an_error(llama: torch.nn.Module) -> None:
    said = refused(assign, manifest(rule("lm_head", "fp32"), rule("*", "fp16")), llama)
    assert "m.json: rules[0] (match = 'lm_head' to fp32) has no effect: rules[1]" in said


def test_norms_stay_fp32_unless_their_class_is_named(llama: torch.nn.Module) -> None:
    everything = assign(manifest(rule("*", "fp16")), llama)
    assert everything["model.norm"].compute == "fp32"
    assert everything["lm_head"].compute == "fp16"
    lowered = assign(manifest(rule("model.layers.*", "bf16", "*RMSNorm"), default="fp16"), llama)
    assert lowered["model.layers.0.input_layernorm"].compute == "bf16"
    assert lowered["model.norm"].compute == "fp32"
    said = refused(assign, manifest(rule("*layernorm", "bf16")), llama)
    assert "matches only norms, which stay FP32; name their module_class" in said


def test_a_class_matches_with_its_base_classes(llama: torch.nn.Module) -> None:
    assigned = assign(manifest(rule(None, "fp16", "Linear"), rule(None, "fp32", "*Attention")), llama)
    assert assigned["lm_head"].compute == "fp16"
    assert assigned["model.layers.0.self_attn"].compute == "fp32"
    said = refused(assign, manifest(rule("lm_head", "fp16", "Liner")), llama)
    assert "matches no module that computes; did you mean Linear" in said


@pytest.mark.parametrize(
    ("match", "told"),
    [
        ("model.layers.0.self_attn.q_pro", "did you mean model.layers.0.self_attn.q_proj"),
        ("model.layers.0", "without matmuls of its own; write model.layers.0.* for what is inside it"),
        ("model.embed_tokens", "a Embedding without matmuls"),
        ("zzz", "matches no module"),
    ],
)
def test_a_rule_that_matches_nothing_names_itself_and_what_is_near(llama, match, told) -> None:
    said = refused(assign, manifest(rule("lm_head", "fp32"), rule(match, "fp16")), llama)
    assert said.startswith(f"m.json: rules[1] (match = '{match}' to fp16)") and told in said


def test_regions_of_gpt2() -> None:
    assert find_regions(small_model("gpt2", num_hidden_layers=1)) == {
        "transformer.h.0.ln_1": "norm",
        "transformer.h.0.attn": "attention",
        "transformer.h.0.attn.c_attn": "matmul",
        "transformer.h.0.attn.c_proj": "matmul",
        "transformer.h.0.ln_2": "norm",
        "transformer.h.0.mlp.c_fc": "matmul",
        "transformer.h.0.mlp.c_proj": "matmul",
        "transformer.ln_f": "norm",
        "lm_head": "matmul",
    }


def test_regions_of_plain_torch() -> None:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, 3, 4))

    parts = {
        "table": torch.nn.Embedding(3, 4),
        "mix": torch.nn.Conv1d(3, 4, 1),
        "attend": torch.nn.MultiheadAttention(4, 2),
        "experts": Experts(),
        "scale": torch.nn.GroupNorm(1, 4),
        "drop": torch.nn.Dropout(),
    }
    # MultiheadAttention uses the weights of its out_proj and never calls it
    expected = {"mix": "matmul", "attend": "attention", "experts": "functional", "scale": "norm"}
    assert find_regions(torch.nn.ModuleDict(parts)) == expected
