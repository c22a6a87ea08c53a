"""The effect of rounding on a merged encoder or encoder-decoder equals plain `peft`, plain transformers and FP64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from transformers import AutoTokenizer

from tests.support.jobs.process_group import ProcessGroup
from tests.support.marks import slow
from tests.support.rows import labelled, seq2seq
from tests.support.runs.exports import exported
from tests.training.checkpoint import resume_cases
from tests.training.tasks.classify_cases import example
from tools.export_hf.gap import Comparison

CLASSIFY = ("task=classify", f"data.sequence_length={labelled.LENGTH}")
CELLS = {
    "sequence": (*CLASSIFY, "classify.kind=sequence", "adapter={kind: lora, r: 4, alpha: 8}"),
    "regression": (*CLASSIFY, "classify.kind=regression", "adapter={kind: dora, r: 4, alpha: 8}"),
    "token": (*CLASSIFY, "classify.kind=token", "adapter={kind: lora, r: 4, alpha: 8}"),
    "seq2seq": (
        *("task=seq2seq", f"data.sequence_length={seq2seq.SOURCE}", f"data.target_length={seq2seq.TARGET}"),
        "adapter={kind: lora, r: 4, alpha: 8}",
    ),
}
ROWS = 8


def outputs(model: Any, tokenizer: Any, rows: list[dict[str, Any]], kind: str) -> list[torch.Tensor]:
    """Log-probabilities at the labels of each row, or the number that is predicted, FP64."""
    found = []
    for row in rows:
        if kind == "seq2seq":
            inputs = dict(tokenizer(row["prompt"], return_tensors="pt"))
            inputs["labels"] = target = tokenizer(row["completion"], return_tensors="pt").input_ids
        else:
            inputs, target = example(tokenizer, row, kind, sorted(labelled.LABELS), pair=False)
        with torch.no_grad():
            logits = model(**inputs).logits.double().flatten(0, -2)
        found.append(logits if kind == "regression" else torch.log_softmax(logits, dim=-1)[target.flatten() != -100])
    return found


@pytest.mark.parametrize("kind", [slow(k) if k == "token" else k for k in CELLS])
def test_what_rounding_does_to_a_merged_model(solo: ProcessGroup, tmp_path: Path, kind: str) -> None:
    if kind == "seq2seq":
        seq2seq.write_model(tmp_path / "base", "t5-v1.1")
        seq2seq.write_rows(tmp_path / "rows.jsonl", ROWS)
    else:
        labelled.write_encoder(tmp_path / "base")
        labelled.write_rows(tmp_path / "rows.jsonl", kind, ROWS)
    overrides = [*CELLS[kind], "model.architecture=null", f"model.name_or_path={tmp_path}/base", "model.config={}"]
    overrides += ["data.source=auto", f"data.path={tmp_path}/rows.jsonl", "data.tokenizer=model", "run.steps=2"]
    overrides += ["precision.compute=bf16", "deepspeed.stage=2", "optimizer.learning_rate=0.05", "guard.spike_sigmas=0"]
    solo.run(resume_cases.job, folder=str(tmp_path), name="run", overrides=overrides, passes=None)
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "step-2"
    facts, _ = exported(checkpoint, tmp_path / "adapter")
    merged, said = exported(checkpoint, tmp_path / "merged", "bf16", merged=True, comparison=Comparison())
    found, gap = merged["adapter"]["merged"], merged["train-inference gap"]

    auto = getattr(transformers, facts["model"]["auto_class"])
    heads = {"sequence": {"num_labels": 3}, "token": {"num_labels": 3}, "regression": {"num_labels": 1}}
    base = auto.from_pretrained(tmp_path / "base", dtype=torch.bfloat16, **heads.get(kind, {})).float()
    exact = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().eval()
    rounded = auto.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    p, q = (torch.cat(outputs(model, tokenizer, rows, kind)) for model in (exact, rounded))
    assert found["rows"] == ROWS and found["unit"] == {"regression": "number", "seq2seq": "token"}.get(kind, "label")
    assert found["largest"] == pytest.approx(float((p - q).abs().max()), rel=1e-3) and found["largest"] > 0
    assert gap["of rounding alone"]["largest difference"] == pytest.approx(found["largest"], rel=1e-6)
    if kind == "regression":
        assert found["difference"] == pytest.approx(float((p - q).abs().mean()), rel=1e-3)
        assert any("in FP32: predicted numbers differ by" in line for line in said)
        return
    kl = (p.exp() * (p - q)).sum(dim=-1)
    assert found["kl"] == pytest.approx(float(kl.mean()), rel=1e-3)
    assert found["largest kl"] == pytest.approx(float(kl.max()), rel=1e-3)
    assert any(f"nats a {found['unit']}, " in line for line in said)
