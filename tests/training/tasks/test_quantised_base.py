"""Adapters on a base in 4 or 8 bits equal plain peft on plain bitsandbytes; the base stays as it is."""

import copy
import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

import torch
from bitsandbytes.functional import dequantize_4bit
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tests.modeling.test_quantised_base import nearest
from tests.support.jobs.process_group import ProcessGroup
from tests.support.models.plain_steps import require_equal
from tests.support.rows.chats import write_folder
from tests.support.runs.exports import exported
from tests.training.checkpoint import resume_cases
from tests.training.tasks import dpo_cases, sft_cases
from tests.training.tasks import quantised_cases as cases
from tests.training.tasks.test_dpo import STARTED
from tools import generate
from training.checkpoint.partitions import open_saved_model

GIVEN = {**sft_cases.GIVEN, "task_type": "CAUSAL_LM"}
BASES = {
    "nf4": "adapter={kind: lora, r: 4, alpha: 8, base: nf4}",
    "nf4, double": "adapter={kind: lora, r: 4, alpha: 8, base: nf4, double_quant: true}",
    "int8": "adapter={kind: lora, r: 4, alpha: 8, base: int8}",
}


STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and chats; bitsandbytes itself computes right on a CPU where rows are whole blocks of 64."""
    return write_folder(tmp_path_factory.mktemp("quantised"), hidden_size=64, intermediate_size=128)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("kind", "stage"), list(product(BASES, STAGES)))
def test_two_ranks_equal_plain_peft(pair: ProcessGroup, folder: Path, kind: str, stage: int) -> None:
    found, *_ = pair.run(cases.steps, folder=folder, stage=stage, overrides=(BASES[kind],))
    base = cases.loaded(folder, kind.partition(",")[0], double="double" in kind)
    model = sft_cases.trained_from(base, found["before"], GIVEN)
    require_equal(found, sft_cases.oracle(folder, found, model))
    first, last = found["codes"]
    assert first == last, "an evaluation and steps leave the base as it is"


def of_the_definition(weight: torch.Tensor, base: str) -> torch.Tensor:
    """(outputs, inputs), FP32: the values that the codes of a weight stand for, in plain torch."""
    if base == "nf4":
        return nearest(weight)
    weight = weight.half().float()  # as bitsandbytes 0.50.2 does before it divides a row by its largest magnitude
    largest = weight.abs().amax(1, keepdim=True)
    return (weight * (127 / largest)).round() * largest / 127


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "stage"), [("nf4", 2), ("int8", 3), ("nf4", 3), ("int8", 2)])
def test_layers_that_hold_inputs_first_equal_plain_torch(pair, tmp_path, kind, stage) -> None:
    """GPT-2's: quantised as (outputs, inputs), here as its own layers in floats, without bitsandbytes."""
    write_folder(tmp_path, "gpt2")
    found, *_ = pair.run(cases.steps, folder=tmp_path, stage=stage, overrides=(BASES[kind],))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    layers = [module for module in base.modules() if isinstance(module, Conv1D)]
    for layer in layers:
        layer.weight.data = of_the_definition(layer.weight.data.T, kind).T.contiguous()
    assert len(found["codes"][0]) == len(layers) == 8
    model = sft_cases.trained_from(base, found["before"], {**GIVEN, "fan_in_fan_out": True})
    require_equal(found, sft_cases.oracle(tmp_path, found, model))
    first, last = found["codes"]
    assert first == last


@pytest.mark.parametrize(("stage", "kind"), [(2, "nf4"), (3, "int8")])
def test_the_ledger_says_what_the_base_takes(pair: ProcessGroup, folder: Path, stage: int, kind: str) -> None:
    rows = pair.run(sft_cases.ledger, folder=folder, stage=stage, compute="bf16", overrides=(BASES[kind],))[0]
    entry = {row.what: row for row in rows}
    # q, k, v, o, gate, up, down of two layers with hidden_size 64 and one of two heads for keys and values
    sizes = 2 * [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128)]
    weights, outputs = sum(out * into for out, into in sizes), sum(out for out, _ in sizes)
    held = {"nf4": weights // 2 + weights // 64 * 4, "int8": weights // (1 if stage < 3 else 2) + outputs * 4}
    assert entry["quantised base"].bytes == held[kind]
    assert entry["quantised base"].dtype == {"nf4": "float32, uint8", "int8": "float32, int8"}[kind]
    assert entry["of these frozen"].dtype == entry["parameters"].dtype == "bfloat16"


def test_the_meter_of_lost_updates_is_of_the_adapter(pair: ProcessGroup, folder: Path) -> None:
    given = {"folder": folder, "stage": 2, "compute": "bf16", "rate": 1e-5, "overrides": (BASES["nf4"],)}
    one, other = pair.run(sft_cases.lost_updates, **given)
    assert one["said"] == other["said"] and max(one["said"].values()) > 0.5


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_preferences_start_from_margins_of_exactly_0(pair: ProcessGroup, folder: Path, stage: int) -> None:
    """The base under the adapter that is off, in the same codes."""
    found = pair.run(dpo_cases.first_step, folder=folder, stage=stage, compute="bf16", overrides=(BASES["nf4"],))[0]
    assert STARTED.items() <= found["metrics"].items()
    assert found["loss"] == pytest.approx(math.log(2), abs=1e-7)


def test_references_of_a_base_in_other_codes_are_not_read(pair: ProcessGroup, folder: Path, tmp_path: Path) -> None:
    given = ("preference.reference=precomputed", f"data.cache_dir={tmp_path}")
    for base in (BASES["nf4"], BASES["int8"], sft_cases.LORA):
        found = pair.run(dpo_cases.first_step, folder=folder, stage=2, compute="bf16", overrides=(base, *given))[0]
        assert found["metrics"] | STARTED == found["metrics"], base
    assert len(list(tmp_path.glob("*/references-*"))) == 3


def test_an_exported_adapter_loads_with_plain_peft(pair: ProcessGroup, folder: Path, tmp_path: Path) -> None:
    overrides = resume_cases.task_job(folder, BASES["nf4"], "precision.compute=bf16", "deepspeed.stage=2")
    checkpoint = resume_cases.checkpoint_of(pair, folder, "nf4", overrides)
    saved = open_saved_model(checkpoint / "deepspeed")
    assert all(".lora_" in name for name in saved.tensors)

    facts, _ = exported(checkpoint, tmp_path / "adapter", "fp32")
    assert facts["adapter"]["base"] == "nf4"
    assert 'bnb_4bit_quant_type="nf4"' in (tmp_path / "adapter/README.md").read_text()
    model = PeftModel.from_pretrained(cases.loaded(folder, "nf4"), tmp_path / "adapter")
    model.train()  # its evaluation packs the base anew, with scales in BF16, where the CPU has BF16 instructions
    loaded = dict(model.get_base_model().named_parameters())
    for name in saved.tensors:
        assert torch.equal(loaded[name], saved.tensors[name].read()), name
    _, said = exported(checkpoint, tmp_path / "merged", "fp32", merged=True)
    assert "merged into the weights that the codes of adapter.base = nf4 stand for" in " ".join(said)
    print(said)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(40)[None] * 7 % 300
    with torch.no_grad():
        held = rounded_to_bf16(model)(input_ids=ids).logits
        assert torch.allclose(merged(input_ids=ids).logits, held, atol=2e-5)
        generating, _ = generate.load(tmp_path / "adapter", dtype="fp32")
        assert torch.allclose(generating(input_ids=ids).logits, model(input_ids=ids).logits, atol=2e-5)
    facts = json.loads((tmp_path / "merged/mantissa.json").read_text())["adapter"]["merged"]
    assert facts["on the base in floats"]["kl"] > 0


def rounded_to_bf16(model: Any) -> Any:
    """The same with the base's values as a BF16 run computes them, FP32."""
    copied = copy.deepcopy(model)
    for name, module in copied.named_modules():
        if name.endswith(".base_layer"):
            weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
            plain = torch.nn.Linear(module.in_features, module.out_features, bias=False)
            plain.weight = torch.nn.Parameter(weight.bfloat16().float(), requires_grad=False)
            copied.set_submodule(name, plain)
    for name, parameter in copied.named_parameters():
        if ".lora_" not in name and parameter.is_floating_point():
            parameter.data = parameter.data.bfloat16().float()
    return copied
