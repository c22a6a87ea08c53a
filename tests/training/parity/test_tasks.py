"""The parity gate judges every kind of fine-tuning: 16 bits against FP32, whole jobs of two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.cli import REPOSITORY
from tests.support.chats import write_base, write_chats, write_pairs
from tests.support.forked_launcher import forked_launcher
from tests.support.labelled import write_encoder, write_rows
from training.parity import gate as parity

pytestmark = pytest.mark.slow
DEMO = str(REPOSITORY / "config/recipes/demo.yaml")
SMALL = [
    *("model.architecture=null", "model.config={}", "data.source=auto", "data.tokenizer=model"),
    *("model.activation_checkpointing=none", "batch={global_size: 8, micro_size: 2}", "optimizer.learning_rate=1e-3"),
    *("data.sequence_length=96", "data.validation_fraction=0.2", "evaluate={every_steps: 0, batches: 4}"),
    *("schedule={name: constant, warmup_steps: 1}", "checkpoint.every_steps=0", "tracking.wandb=disabled"),
    *("generate.tokens=0", "parity.points=1"),
]
LORA = "adapter={kind: lora, r: 4, alpha: 8}"
CASES = {
    "sft": ("base", "chats", ["precision.compute=bf16", "deepspeed.stage=3"]),
    "sft, LoRA": ("base", "chats", ["precision.compute=bf16", "deepspeed.stage=2", LORA]),
    "sft, NF4": ("base", "chats", ["precision.compute=bf16", "deepspeed.stage=2", LORA[:-1] + ", base: nf4}"]),
    "sft, int8": ("base", "chats", ["precision.compute=fp16", "deepspeed.stage=3", LORA[:-1] + ", base: int8}"]),
    "dpo": ("base", "pairs", ["precision.compute=fp16", "deepspeed.stage=1"]),
    "dpo, LoRA": ("base", "pairs", ["precision.compute=bf16", "deepspeed.stage=2", LORA]),
    "distill": (
        "base",
        "chats",
        ["precision.compute=bf16", "data.format=messages", "distill.teacher={folder}/teacher"],
    ),
    "classify": ("encoder", "rows", ["precision.compute=bf16", "data.sequence_length=40"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and data of each kind."""
    made = tmp_path_factory.mktemp("gate")
    write_base(made / "base")
    write_base(made / "teacher", seed=1)
    write_encoder(made / "encoder")
    write_chats(made / "chats.jsonl", 80)
    write_pairs(made / "pairs.jsonl", 60)
    write_rows(made / "rows.jsonl", "sequence", 80)
    return made


@pytest.mark.parametrize("name", CASES)
def test_half_precision_is_within_the_gates_bounds(folder: Path, name: str) -> None:
    model, data, own = CASES[name]
    if name.endswith(("NF4", "int8")):
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    given = [*SMALL, f"task={name.partition(',')[0]}", f"model.name_or_path={folder}/{model}"]
    given += [f"data.path={folder}/{data}.jsonl", f"data.cache_dir={folder}/cache"]
    given += [item.replace("{folder}", str(folder)) for item in own]
    with forked_launcher(2) as launcher:
        out = folder / name.replace(", ", "-")
        chosen = parity.plan(DEMO, given, folder=out, steps=8, processes=2, launcher=launcher)
        found = parity.gate(chosen, references=parity.train_references(chosen, print))
    assert (found["verdict"], found["failed"]) == ("parity", [])
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["module_error"]["measured"] > 0, "it was compared"
