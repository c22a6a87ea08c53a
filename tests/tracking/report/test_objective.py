"""A run's objective is described as its task defines it, from the recorded config, and losses have their own unit."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.load import load_config, to_dict
from config.task import loss_unit, settle_task
from tests.support.runs.report_runs import report_of, session
from tracking.run_dir import RunDir

TASKS = [
    ("pretrain", {}, "nats per token", "pretrain", "sequences of 1024 tokens"),
    ("sft", {}, "nats per token", "sft", "sequences of 1024 tokens"),
    ("sft", {"data.packing": "none"}, "nats per token", "sft", "rows of at most 1024 tokens"),
    ("sft", {"sft.loss": "row"}, "nats per token, mean over rows", "sft, mean over rows", "sequences of 1024 tokens"),
    (
        "dpo",
        {"preference.sft_weight": 0.5},
        "",
        "dpo, sigmoid with beta 0.1, reference precomputed, 0.5 x cross-entropy of the chosen answer",
        "pairs of at most 1024 tokens a side",
    ),
    ("dpo", {"adapter.kind": "lora"}, "", "reference adapter off", "lora, rank 16, alpha 32"),
    (
        "distill",
        {"distill.teacher": "big", "distill.top_k": 8, "distill.ce_weight": 0.5},
        "",
        "distill, forward_kl at temperature 1.0 from big, its 8 likeliest tokens, 0.5 x cross-entropy of the labels",
        "sequences of 1024 tokens",
    ),
    ("classify", {"classify.kind": "regression"}, "mean squared error", "classify, regression", "rows of at most 1024"),
    ("classify", {"classify.kind": "token"}, "nats per label", "classify, token", "rows of at most 1024 tokens"),
    ("classify", {}, "nats per row", "classify, sequence", "rows of at most 1024 tokens"),
    ("mlm", {"mlm.whole_word": False}, "nats per token", "mlm, 15% of the tokens chosen", "sequences of 1024 tokens"),
    ("seq2seq", {"data.target_length": 64}, "nats per token", "seq2seq", "1024 tokens and 64 of the target"),
]


@pytest.mark.parametrize(("task", "given", "unit", "said", "batch"), TASKS)
def test_the_report_says_what_was_minimised(
    tmp_path: Path, task: str, given: dict[str, Any], unit: str, said: str, batch: str
) -> None:
    (tmp_path / "rows.jsonl").touch()
    data = f"{{source: jsonl, path: {tmp_path}/rows.jsonl, tokenizer: bytes}}"
    (tmp_path / "run.yaml").write_text(f"model: {{name_or_path: owner/base}}\ndata: {data}\n")
    overrides = [f"{key}={json.dumps(value)}" for key, value in {"task": task, **given}.items()]
    overrides += ["data.sequence_length=1024"]
    config = settle_task(load_config(tmp_path / "run.yaml", overrides, None))
    assert loss_unit(config) == unit
    folder = RunDir(tmp_path / "run")
    with session(folder.path, loss_unit=unit) as run:
        run.steps(2)
        run.event("eval", loss=900.5, perplexity=None)
    folder.write_inputs(to_dict(config), {}, {})
    page = report_of(folder)
    assert said in page and batch in page
    assert f"| training loss{f' ({unit})' if unit else ''} |" in page
    assert f"| 900.5000{f' {unit}' if unit else ''} at " in page
