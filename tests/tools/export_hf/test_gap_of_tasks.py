"""The train-inference gap of other tasks equals plain transformers and FP64 at each label, or of each number."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from config.task import model_class_of
from tests.support.jobs.process_group import ProcessGroup
from tests.support.jobs.task_jobs import overrides_of, write_all
from tests.support.rows import seq2seq
from tests.support.rows.labelled import LABELS, write_encoder, write_rows
from tests.support.runs.exports import source_of
from tests.training.checkpoint import resume_cases
from tests.training.tasks.classify_cases import example
from tools.export_hf import rows
from tools.export_hf.command import main
from tools.export_hf.gap import Bounds, GapTooLarge, measure, require_within
from tools.export_hf.rows import Row, rows_of_data
from training.checkpoint.partitions import open_saved_model

JOBS = {
    "sequence": ("classify", "bert"),
    "token": ("classify, token", "modernbert"),
    "regression": ("classify, regression", "deberta-v2"),
    "mlm": ("mlm", "bert"),
    "seq2seq": ("seq2seq", "t5-v1.1"),
}
"""The job of `task_jobs` of each kind, and its model."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Encoders, the data of runs, and others."""
    made = write_all(tmp_path_factory.mktemp("gap_encoders"))
    for family in ("bert", "modernbert", "deberta-v2"):
        write_encoder(made / family, family)
    seq2seq.write_model(made / "t5-v1.1", "t5-v1.1")  # with a head of its own
    seq2seq.write_rows(made / "seq2seq-others.jsonl", 5, seed=1)
    for kind in ("sequence", "token", "regression"):
        write_rows(made / f"{kind}-others.jsonl", kind, 5, seed=1)
    (made / "mlm-others.txt").write_text("a model losses the rank in testing " * 12)
    return made


@pytest.fixture(scope="module")
def checkpoints(solo: ProcessGroup, folder: Path) -> Any:
    """Returns the checkpoint of a kind after two steps in BF16."""

    @functools.cache
    def checkpoint(kind: str) -> Path:
        job, family = JOBS[kind]
        given = [*overrides_of(folder, job), f"model.name_or_path={folder}/{family}", "precision.compute=bf16"]
        return resume_cases.checkpoint_of(solo, folder, kind, [*given, "deepspeed.stage=2"])

    return checkpoint


def others(folder: Path, kind: str) -> Path:
    return folder / (f"{kind}-others.txt" if kind == "mlm" else f"{kind}-others.jsonl")


def masters_of(checkpoint: Path, out: Path, auto: Any) -> Any:
    """Plain transformers with the masters, FP32."""
    model = auto.from_pretrained(out, dtype=torch.float32).eval()
    saved = open_saved_model(checkpoint / "deepspeed")
    missing = model.load_state_dict({name: tensor.read() for name, tensor in saved.tensors.items()}, strict=False)
    assert not missing.unexpected_keys
    tied = ("decoder", "position_ids", "embed_tokens")
    assert all(any(word in name for word in tied) for name in missing.missing_keys)
    return model


def examples(folder: Path, checkpoint: Path, out: Path, kind: str) -> list[tuple[dict[str, torch.Tensor], Any]]:
    """Inputs and labels of the other rows; hidden words from Mantissa, all else by transformers alone."""
    tokenizer, names = AutoTokenizer.from_pretrained(out), sorted(LABELS)
    rows = [] if kind == "mlm" else list(map(json.loads, others(folder, kind).read_text().splitlines()))
    if kind == "seq2seq":
        targets = [tokenizer(row["completion"], return_tensors="pt").input_ids for row in rows]
        inputs = [dict(tokenizer(row["prompt"], return_tensors="pt")) for row in rows]
        return [({**given, "labels": target}, target[0]) for given, target in zip(inputs, targets, strict=True)]
    if kind != "mlm":
        return [example(tokenizer, row, kind, names, pair=False) for row in rows]
    source, found = source_of(checkpoint), []
    text = str(tokenizer(others(folder, kind).read_text()).input_ids)
    for row in rows_of_data(str(others(folder, kind)), source.config, source.tokenizer, 9):
        seen = row.inputs["input_ids"]
        labels = torch.full_like(seen[0], -100)
        labels[row.places] = row.labels
        whole = torch.where(labels == -100, seen[0], labels).tolist()
        assert (whole[0], whole[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
        assert str(whole[1:-1])[1:-1] in text
        assert (seen[0][row.places] == tokenizer.mask_token_id).any() and len(row.places) < len(whole) / 2
        found.append(({"input_ids": seen, "attention_mask": torch.ones_like(seen)}, labels))
    return found


@pytest.mark.parametrize("kind", ["sequence", "token", "mlm", "seq2seq"])
def test_the_gap_is_that_of_plain_transformers_at_each_label(
    folder: Path, checkpoints: Any, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, checkpoint = tmp_path / "out", checkpoints(kind)
    command = [str(checkpoint), str(out), "--dtype", "bf16", "--compare-logits", str(others(folder, kind))]
    assert main([*command, "--compare-rows", "9", "--largest-difference", "1e-9"]) == 3
    assert "is above the bound 1e-09" in capsys.readouterr().err and not out.exists()
    assert main([*command, "--compare-rows", "9", "--largest-kl", "0.1"]) == 0
    facts = json.loads((out / "mantissa.json").read_text())
    gap, auto = facts["train-inference gap"], getattr(transformers, facts["model"]["auto_class"])
    exact, given = masters_of(checkpoint, out, auto), examples(folder, checkpoint, out, kind)
    for figures, computed in ((gap, torch.bfloat16), (gap["of rounding alone"], torch.float32)):
        export, kl, difference, own, places = auto.from_pretrained(out, dtype=computed).eval(), [], [], [], []
        for inputs, labels in given:
            with torch.no_grad():
                logits = [model(**inputs).logits.double().flatten(0, -2) for model in (exact, export)]
            p, q = (torch.log_softmax(values, dim=-1)[labels != -100] for values in logits)
            kl.append((p.exp() * (p - q)).sum(dim=-1))
            difference.append((p - q).abs().amax(dim=-1))
            own.append((p - q).abs()[torch.arange(len(p)), labels[labels != -100]])
            places.append((labels != -100).nonzero()[:, 0])
        assert figures["kl"] == pytest.approx(float(torch.cat(kl).mean()), rel=1e-6)
        assert figures["largest kl"] == pytest.approx(float(torch.cat(kl).max()), rel=1e-6)
        assert figures["largest difference"] == pytest.approx(float(torch.cat(difference).max()), rel=1e-6)
        if figures is gap:
            unit = "token" if kind in ("mlm", "seq2seq") else "label"
            assert gap[f"largest difference of the row's {unit}s"] == pytest.approx(float(torch.cat(own).max()))
            assert (gap["rows"], gap[f"{unit}s"]) == (len(given), len(torch.cat(kl)))
            worst = max(range(len(given)), key=lambda row: float(kl[row].max()))
            where = {} if kind == "sequence" else {"position": int(places[worst][kl[worst].argmax()])}
            assert gap["worst"] == {"row": worst, **where}
            early = torch.cat(kl)[(torch.cat(places) >= 2) & (torch.cat(places) < 4)]
            by_position = gap["by position"]
            assert by_position == {} if kind == "sequence" else by_position["2-3"]["kl"] == pytest.approx(early.mean())
    assert 0 < gap["of rounding alone"]["kl"] < 2 * gap["kl"]
    assert f"| largest kl | {gap['largest kl']:.6g} |" in (out / "README.md").read_text()
    assert main([*command[:3], "fp32", "--compare-logits", "--force"]) == 0
    own_rows = json.loads((out / "mantissa.json").read_text())["train-inference gap"]
    assert own_rows["largest difference"] == 0 and own_rows["rows"] > 1


def test_the_gap_of_a_number_is_its_difference(
    folder: Path, checkpoints: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, checkpoint = tmp_path / "out", checkpoints("regression")
    command = [str(checkpoint), str(out), "--dtype", "bf16", "--compare-logits", str(others(folder, "regression"))]
    assert main([*command, "--largest-kl", "1"]) == 2
    assert "--largest-kl: the model predicts a number, which has no KL" in capsys.readouterr().err
    assert main([*command, "--largest-difference", "1e-9"]) == 3
    said = capsys.readouterr()
    assert "the largest difference of a number between export and masters" in said.err and "nats" not in said.err
    assert main(command) == 0
    gap = json.loads((out / "mantissa.json").read_text())["train-inference gap"]
    auto = transformers.AutoModelForSequenceClassification
    exact = masters_of(checkpoint, out, auto)
    for figures, computed in ((gap, torch.bfloat16), (gap["of rounding alone"], torch.float32)):
        export, found = auto.from_pretrained(out, dtype=computed).eval(), []
        for inputs, _ in examples(folder, checkpoint, out, "regression"):
            with torch.no_grad():
                found.append(float((exact(**inputs).logits.double() - export(**inputs).logits.double()).abs()))
        assert figures["largest difference"] == pytest.approx(max(found), rel=1e-6)
        assert figures["difference"] == pytest.approx(sum(found) / len(found), rel=1e-6)
        if figures is gap:
            assert (gap["rows"], gap["worst"], gap["by position"]) == (5, {"row": found.index(max(found))}, {})
    assert "kl" not in gap and gap["difference"] > 0
    card = (out / "README.md").read_text()
    assert f"| difference | {gap['difference']:.6g} |" in card and "Differences of the predicted numbers; " in card

    module = "deberta.encoder.layer.1.output.dense"
    exact.save_pretrained(tmp_path / "wrong")
    weights = load_file(tmp_path / "wrong" / "model.safetensors")
    weights[f"{module}.weight"] = weights[f"{module}.weight"].bfloat16().float()
    save_file(weights, tmp_path / "wrong" / "model.safetensors", metadata={"format": "pt"})
    inputs = examples(folder, checkpoint, out, "regression")[0][0]
    row, zero = Row(inputs, torch.tensor([0]), torch.tensor([0]), "number"), Bounds(difference=0.0)
    wrong = measure(exact, tmp_path / "wrong", [row], model_class=auto.__name__, trust_remote_code=False)
    with pytest.raises(GapTooLarge, match=f"in row 0\\); {module} has the largest error of its own"):
        require_within(wrong, zero)


@pytest.mark.parametrize("kind", ["token", "seq2seq"])
def test_a_long_row_is_cut_with_its_labels(
    folder: Path, checkpoints: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(checkpoints(kind))
    given = (str(others(folder, kind)), source.config, source.tokenizer)
    whole = rows_of_data(*given)
    monkeypatch.setattr(rows, "_TOKENS", 6)
    cut = rows_of_data(*given)
    assert len(cut) == len(whole) == 5 and max(row.inputs["input_ids"].shape[1] for row in whole) > 6
    for short, long in zip(cut, whole, strict=True):
        for name in short.inputs.keys() - {"use_cache"}:
            assert torch.equal(short.inputs[name], long.inputs[name][:, :6]), name
        assert torch.equal(short.places, long.places[long.places < 6])
        assert torch.equal(short.labels, long.labels[: len(short.places)])


def test_data_of_another_kind_are_refused(folder: Path, checkpoints: Any, tmp_path: Path, refusal: Any) -> None:
    checkpoint = checkpoints("sequence")
    source = source_of(checkpoint)
    assert model_class_of(source.config) == "AutoModelForSequenceClassification"
    scored: dict[str, Any] = {"task": "classify", "classify": {"kind": "regression"}, "model": {"architecture": "bert"}}
    scored["data"] = {"path": f"{folder}/regression.jsonl", "source": "jsonl"}
    (folder / "scored.yaml").write_text(yaml.safe_dump(scored))
    write_rows(folder / "new.jsonl", "sequence", 9, labels=("good", "dull"))
    for data, problem in (
        ("mlm-others.txt", "is text, and task = classify reads rows; give JSONL or Parquet"),
        ("new.jsonl", "has the label 'dull', which is new to the model; remove it"),
        ("scored.yaml", "has task = classify, classify.kind = regression, the exported run task = classify, "),
    ):
        command = [str(checkpoint), str(tmp_path / "out"), "--dtype", "bf16", "--compare-logits", f"{folder}/{data}"]
        assert problem in refusal(main, command)
