"""Adapters on encoder-decoders equal plain torch with plain `peft`, and what comes out loads there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSeq2SeqLM
from transformers import AutoTokenizer

from tests.support.jobs.process_group import ProcessGroup
from tests.support.models.plain_steps import require_equal
from tests.support.runs.exports import exported_adapter
from tests.training.checkpoint import resume_cases
from tests.training.tasks import seq2seq_cases as cases
from tests.training.tasks.test_seq2seq import asked, job
from tools.generate import main as generate

LORA = "adapter={kind: lora, r: 4, alpha: 8}"
GIVEN = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "SEQ_2_SEQ_LM"}


CELLS: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "t5-v1.1": ("t5-v1.1", 3, LORA, GIVEN),
    "t5, one side's attention": (
        *("t5", 2, "adapter={kind: dora, r: 4, alpha: 8, target_modules: [q, v]}"),
        GIVEN | {"target_modules": ["q", "v"], "use_dora": True},
    ),
    "bart": ("bart", 0, LORA, GIVEN),
    "a head of its own, trained whole": (
        *("t5-v1.1", 2, LORA[:-1] + ", modules_to_save: [lm_head]}"),
        GIVEN | {"modules_to_save": ["lm_head"]},
    ),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("what", CELLS)
def test_one_and_two_ranks_equal_plain_peft(pair: ProcessGroup, solo: ProcessGroup, sides: Path, what: str) -> None:
    family, stage, adapter, given = CELLS[what]
    found, _ = pair.run(cases.steps, folder=sides, family=family, stage=stage, overrides=(adapter,))
    assert all("lora_" in name or "modules_to_save" in name for name in found["after"])
    [alone] = solo.run(cases.steps, folder=sides, family=family, stage=stage, overrides=(adapter,))
    exact = cases.oracle(sides, found, family=family, adapter=given)
    require_equal(found, exact)
    require_equal(alone, exact)


JOBS = {
    "t5-v1.1": ("precision.compute=bf16", "deepspeed.stage=3", LORA),
    "bart": ("precision.compute=fp16", "deepspeed.stage=2", LORA),
    "t5": (
        *("precision.compute=bf16", "deepspeed.stage=2"),
        "adapter={kind: dora, r: 4, alpha: 8, modules_to_save: [lm_head]}",
    ),
}
"""Overrides by family."""


@pytest.mark.slow
@pytest.mark.parametrize("family", JOBS)
def test_an_export_is_a_folder_of_plain_peft_and_a_merged_model(
    pair: ProcessGroup, sides: Path, tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The masters are exported: equal logits in plain `peft` and in plain transformers, and the same answers."""
    checkpoint = resume_cases.checkpoint_of(pair, sides, f"{family}-adapter", job(sides, family, *JOBS[family]))
    computed = torch.float16 if family == "bart" else torch.bfloat16
    facts, saved, _, said = exported_adapter(
        checkpoint, tmp_path, lambda auto: auto.from_pretrained(sides / family, dtype=computed), asked(sides, family)
    )
    assert ("lm_head.modules_to_save.default.weight" in saved) == (family == "t5")
    assert any("against base and adapter in FP32: KL" in line for line in said)
    assert facts["model"]["auto_class"] == "AutoModelForSeq2SeqLM"
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "AutoModelForSeq2SeqLM.from_pretrained(" in card and "PeftModel.from_pretrained(base, FOLDER)" in card
    answered(tmp_path / "adapter", capsys)


def answered(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`tools.generate` says of the adapter's sides what `generate` of plain `peft` says to the same source."""
    assert generate([str(adapter), "--prompt", "a model loss", "--tokens", "8"]) == 0
    said = capsys.readouterr().out
    model: Any = AutoPeftModelForSeq2SeqLM.from_pretrained(str(adapter))
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    inputs = tokenizer("a model loss", return_tensors="pt")
    cache = "t5" not in str(model.config.model_type)
    found = model.generate(**inputs, max_new_tokens=8, do_sample=False, use_cache=cache)
    assert said == tokenizer.decode(found[0], skip_special_tokens=True) + "\n"
