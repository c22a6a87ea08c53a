"""The train-inference gap of encoder-decoders equals plain transformers and FP64 on the tokens of each target."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from config.task import SEQ2SEQ_LM
from tests.support.jobs.process_group import ProcessGroup
from tests.support.rows.seq2seq import SOURCE, TARGET, write_model, write_rows
from tests.support.runs.exports import source_of
from tests.training.checkpoint import resume_cases
from tools.export_hf import rows
from tools.export_hf.command import main
from tools.export_hf.gap import Bounds, GapTooLarge, measure, require_within
from tools.export_hf.rows import Row, rows_of_data
from training.checkpoint.partitions import open_saved_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two families, one with a head of its own, the rows of a run and others."""
    made = tmp_path_factory.mktemp("gap_seq2seq")
    for family in ("t5-v1.1", "bart"):
        write_model(made / family, family)
    write_rows(made / "rows.jsonl", 40)
    write_rows(made / "others.jsonl", 5, seed=1)
    return made


@pytest.fixture(scope="module")
def checkpoint(solo: ProcessGroup, folder: Path) -> Path:
    """The checkpoint after two steps of T5 1.1 in BF16."""
    overrides = ["task=seq2seq", "model.architecture=null", f"model.name_or_path={folder}/t5-v1.1", "model.config={}"]
    overrides += ["data.source=auto", f"data.path={folder}/rows.jsonl", "data.tokenizer=model", "run.steps=2"]
    overrides += [f"data.sequence_length={SOURCE}", f"data.target_length={TARGET}", "data.validation_fraction=0.2"]
    overrides += ["precision.compute=bf16", "deepspeed.stage=2", "optimizer.learning_rate=0.01", "guard.spike_sigmas=0"]
    solo.run(resume_cases.job, folder=str(folder), name="gap", overrides=overrides, passes=None)
    return folder / "runs" / "gap" / "checkpoints" / "step-2"


def log_probabilities(model: Any, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """FP64, by the model's own `labels`."""
    with torch.no_grad():
        logits = model(input_ids=source, attention_mask=torch.ones_like(source), labels=target).logits
    return torch.log_softmax(logits[0].double(), dim=-1)


def test_the_gap_of_a_run_is_that_of_plain_transformers(
    folder: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, others = tmp_path / "out", folder / "others.jsonl"
    command = [str(checkpoint), str(out), "--dtype", "bf16", "--compare-logits"]
    assert main([*command, str(others), "--largest-kl", "1e-9"]) == 3
    said = capsys.readouterr()
    assert "is above the bound 1e-09" in said.err and "nothing was exported" in said.err
    assert not out.exists()
    assert main([*command, str(others), "--largest-kl", "0.1"]) == 0
    gap = json.loads((out / "mantissa.json").read_text())["train-inference gap"]

    masters: Any = AutoModelForSeq2SeqLM.from_pretrained(folder / "t5-v1.1").eval()
    saved = open_saved_model(checkpoint / "deepspeed")
    masters.load_state_dict({name: tensor.read() for name, tensor in saved.tensors.items()}, strict=False)
    tokenizer, kl, difference, own = AutoTokenizer.from_pretrained(out), [], [], []
    for facts, computed in ((gap, torch.bfloat16), (gap["of rounding alone"], torch.float32)):
        export: Any = AutoModelForSeq2SeqLM.from_pretrained(out, dtype=computed).eval()
        kl, difference, own = [], [], []
        for line in others.read_text().splitlines():
            source, target = (
                tokenizer(json.loads(line)[side], return_tensors="pt").input_ids for side in ("prompt", "completion")
            )
            p, q = (log_probabilities(model, source, target) for model in (masters, export))
            kl.append((p.exp() * (p - q)).sum(dim=-1))
            difference.append((p - q).abs().amax(dim=-1))
            own.append((p - q).abs().gather(1, target[0][:, None]))
        assert facts["kl"] == pytest.approx(float(torch.cat(kl).mean()), rel=1e-6)
        assert facts["largest kl"] == pytest.approx(float(torch.cat(kl).max()), rel=1e-6)
        assert facts["largest difference"] == pytest.approx(float(torch.cat(difference).max()), rel=1e-6)
        if facts is gap:
            worst = max(range(5), key=lambda row: float(kl[row].max()))
            assert gap["worst"] == {"row": worst, "position": int(kl[worst].argmax())}
            assert gap["by position"]["0"]["kl"] == pytest.approx(float(torch.stack([row[0] for row in kl]).mean()))
            assert gap["largest difference of the row's tokens"] == pytest.approx(float(torch.cat(own).max()))
    assert (gap["rows"], gap["tokens"]) == (5, len(torch.cat(kl)))
    assert 0 < gap["of rounding alone"]["kl"] < gap["kl"]
    assert f"| largest kl | {gap['largest kl']:.6g} |" in (out / "README.md").read_text()


def test_rows_are_the_run_s_own_or_another_config_s(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    command = [str(checkpoint), str(tmp_path / "out"), "--dtype", "fp32", "--force", "--compare-logits"]
    other: dict[str, Any] = {
        "task": "seq2seq",
        "model": {"name_or_path": f"{folder}/bart"},
        "data": {"path": f"{folder}/others.jsonl", "source": "auto", "validation_fraction": 0.0},
    }
    other["data"] |= {"sequence_length": 400, "cache_dir": f"{folder}/cache"}
    (folder / "other.yaml").write_text(yaml.safe_dump(other))
    for data, count in (([], 3), ([f"{folder}/other.yaml"], 5)):
        assert main([*command, *data, "--compare-rows", "3" if not data else "9"]) == 0
        gap = json.loads((tmp_path / "out" / "mantissa.json").read_text())["train-inference gap"]
        assert gap["rows"] == count and gap["tokens"] > 10
        assert gap["largest kl"] == gap["largest difference"] == 0


def test_a_long_row_is_cut_on_both_sides(folder: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(checkpoint)
    given = (f"{folder}/others.jsonl", source.config, source.tokenizer)
    whole = rows_of_data(*given)
    monkeypatch.setattr(rows, "_TOKENS", 4)
    for short, long in zip(rows_of_data(*given), whole, strict=True):
        for name in ("input_ids", "attention_mask", "decoder_input_ids"):
            assert torch.equal(short.inputs[name], long.inputs[name][:, :4]), name
        assert torch.equal(short.labels, long.labels[:4]) and torch.equal(short.places, long.places[:4])
    assert max(len(row.labels) for row in whole) > 4


@pytest.mark.parametrize(
    ("family", "module"),
    [("t5-v1.1", "decoder.block.1.layer.1.EncDecAttention.o"), ("bart", "model.encoder.layers.1.fc2")],
)
def test_a_wrong_weight_of_either_side_is_named(folder: Path, tmp_path: Path, family: str, module: str) -> None:
    exact: Any = AutoModelForSeq2SeqLM.from_pretrained(folder / family).eval()
    exact.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights[f"{module}.weight"] = weights[f"{module}.weight"].bfloat16().float()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source, target = torch.arange(5, 25), torch.arange(30, 42)
    answer = torch.cat([torch.zeros(1).long(), target[:-1]])
    given = {"input_ids": source[None], "decoder_input_ids": answer[None], "use_cache": False}
    row = Row(given, torch.arange(len(target)), target)
    found = measure(exact, tmp_path, [row], model_class=SEQ2SEQ_LM, trust_remote_code=False)
    assert found["modules"][0]["module"] == module
    with pytest.raises(GapTooLarge, match=f"{module} has the largest error of its own"):
        require_within(found, Bounds(kl=0.0))
