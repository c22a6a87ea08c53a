"""An adapter's folder has the masters and loads with plain peft; merged, too, and what rounding lost is said."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from config.errors import UserError
from tests.support.jobs.process_group import ProcessGroup
from tests.support.runs.exports import exported, exported_adapter
from tests.training.checkpoint import resume_cases as cases
from tests.training.tasks.conftest import folder

__all__ = ["folder"]
KINDS = {
    "lora": "adapter={kind: lora, r: 4, modules_to_save: [lm_head]}",
    "dora": "adapter={kind: dora, r: 4, rslora: true, target_modules: [q_proj, down_proj]}",
}


@pytest.fixture(scope="module", params=KINDS)
def run(pair: ProcessGroup, folder: Path, request: pytest.FixtureRequest) -> Path:
    """The last checkpoint of a BF16 run at ZeRO-3."""
    overrides = cases.task_job(folder, KINDS[request.param], "precision.compute=bf16", "deepspeed.stage=3")
    return cases.checkpoint_of(pair, folder, request.param, overrides)


@pytest.mark.one_in(2)
def test_plain_peft_loads_the_folder_and_the_merge_computes_the_same(run: Path, tmp_path: Path) -> None:
    base, inputs = run.parents[3] / "base", {"input_ids": torch.arange(40)[None] * 7 % 300}
    facts, *_ = exported_adapter(run, tmp_path, lambda auto: auto.from_pretrained(base, dtype=torch.bfloat16), inputs)
    assert facts["adapter"]["merged"] is None
    assert "AutoPeftModelForCausalLM" in (tmp_path / "adapter" / "README.md").read_text()
    merged = json.loads((tmp_path / "merged" / "mantissa.json").read_text())["adapter"]["merged"]
    assert max(merged["lost by rounding"].values()) == merged["kl"] == 0


@pytest.mark.one_in(2)
def test_what_rounding_loses_is_measured(run: Path, tmp_path: Path) -> None:
    facts, said = exported(run, tmp_path / "merged", "bf16", merged=True)
    exact, _ = exported(run, tmp_path / "exact", "fp32", merged=True)
    base = AutoModelForCausalLM.from_pretrained(run.parents[3] / "base", dtype=torch.bfloat16).float()
    merged, whole = (AutoModelForCausalLM.from_pretrained(tmp_path / name).float() for name in ("merged", "exact"))
    found = facts["adapter"]["merged"]
    for layer, share in found["lost by rounding"].items():
        weights = [model.get_submodule(layer).weight.detach().double() for model in (base, whole, merged)]
        assert share == pytest.approx(
            float((weights[2] - weights[1]).norm() / (weights[1] - weights[0]).norm()), rel=1e-4
        )
        assert 0 < share < 1
    assert 0 < found["kl"] < found["largest kl"]
    assert "rounding to bf16 lost" in said[1]
    assert "KL" in said[2]
    assert json.loads((tmp_path / "merged" / "mantissa.json").read_text())["adapter"]["merged"]["kl"] == found["kl"]


def test_a_merge_from_fp32_is_that_of_plain_peft_rounded_once(run: Path, tmp_path: Path) -> None:
    """And the usual one is that of `peft` on the base rounded to BF16, which the run computed in."""
    exported(run, tmp_path / "adapter", "fp32")
    for merge_from, dtype in (("fp32", torch.float32), ("compute", torch.bfloat16)):
        facts, _ = exported(run, tmp_path / merge_from, "bf16", merged=True, merge_from=merge_from)
        assert facts["adapter"]["merged"]["from"] == merge_from
        base = AutoModelForCausalLM.from_pretrained(run.parents[3] / "base", dtype=dtype).float()
        model: Any = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
        expected = {name: value.bfloat16() for name, value in model.state_dict().items()}
        found = AutoModelForCausalLM.from_pretrained(tmp_path / merge_from, dtype=torch.bfloat16).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_without_adapter_has_none_to_merge(finished: Path, tmp_path: Path) -> None:
    checkpoint = finished / "runs/it/checkpoints/step-6"
    with pytest.raises(UserError, match="--merge-adapters: .* has adapter.kind = none"):
        exported(checkpoint, tmp_path / "out", "fp32", merged=True)
