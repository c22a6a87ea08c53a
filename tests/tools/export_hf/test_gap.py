"""The train-inference gap, of each task, equals an independent computation, and a wrong export is found and named."""

import bz2
import functools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from config.load import to_yaml
from config.task import CAUSAL_LM, model_class_of
from tests.support.jobs.process_group import ProcessGroup
from tests.support.jobs.task_jobs import overrides_of, write_all
from tests.support.models.small_models import small_model
from tests.support.rows import seq2seq
from tests.support.rows.chats import write_base, write_chats
from tests.support.rows.labelled import LABELS, write_encoder, write_rows
from tests.support.runs.exports import source_of
from tests.training.checkpoint import resume_cases
from tests.training.tasks.classify_cases import example
from tests.training.tasks.sft_cases import resolve
from tools.export_hf.command import main
from tools.export_hf.gap import Bounds, GapTooLarge, measure, of_masters, require_within, row_gap
from tools.export_hf.rows import Row, rows_of_data
from training.checkpoint.partitions import SavedModel, SavedTensor, open_saved_model


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with its tokenizer, and chats."""
    made = tmp_path_factory.mktemp("chats")
    write_base(made / "base")
    write_chats(made / "chats.jsonl", 12)
    write_chats(made / "others.jsonl", 5, seed=1)
    return made


def ids_of(row: Row) -> torch.Tensor:
    ids: torch.Tensor = row.inputs["input_ids"][0]
    return ids


def test_rows_are_those_of_the_data_that_is_named(chats: Path) -> None:
    """A file as the run reads its own, without its validation sets, or the data of another config; one tokenizer."""
    sets = f"data.validation=[{{path: {chats}/others.jsonl, format: messages}}]"
    config = resolve(chats, overrides=("data.packing=none", sets)).config
    tokenizer = AutoTokenizer.from_pretrained(chats / "base")
    of_file = rows_of_data(str(chats / "others.jsonl"), config, chats / "base", 3)
    whole = [json.loads(line)["messages"] for line in (chats / "others.jsonl").read_text().splitlines()]
    texts = {tokenizer.apply_chat_template(turns, tokenize=False) for turns in whole}
    assert len(of_file) == 3
    assert {tokenizer.decode(ids_of(row)) for row in of_file} <= texts
    (chats / "others.jsonl.bz2").write_bytes(bz2.compress((chats / "others.jsonl").read_bytes()))
    packed = rows_of_data(str(chats / "others.jsonl.bz2"), config, chats / "base", 3)
    assert [ids_of(row).tolist() for row in packed] == [ids_of(row).tolist() for row in of_file]
    written = yaml.safe_load(to_yaml(config)) | {"task": "sft"}
    written["data"] |= {"path": str(chats / "others.jsonl"), "tokenizer": "bytes", "validation": []}
    (chats / "other.yaml").write_text(yaml.safe_dump(written))
    of_config = rows_of_data(str(chats / "other.yaml"), config, chats / "base", 5)
    assert {tokenizer.decode(ids_of(row)) for row in of_config} == texts


def test_a_text_file_is_read_whatever_separated_the_run_s_documents(chats: Path) -> None:
    config = resolve(chats, overrides=("data.packing=none",)).config
    split = replace(config, data=replace(config.data, document_separator="\n==\n"))
    (chats / "plain.txt").write_text("some words " * 40)
    assert len(rows_of_data(str(chats / "plain.txt"), split, chats / "base", 1)) == 1


SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
CAUSAL: dict[str, Any] = {"model_class": CAUSAL_LM, "trust_remote_code": False}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


@pytest.fixture(scope="module")
def exact() -> Any:
    """The masters, with logits of a trained model's size: at the start they are all near 0."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, initializer_range=0.1)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Rows of different lengths, one longer than a chunk."""
    generator = torch.Generator().manual_seed(1)
    return [Row.of_text(torch.randint(300, (length,), generator=generator)) for length in (100, 3, 20)]


def exported(exact: Any, folder: Path, dtype: torch.dtype) -> Path:
    """The masters, rounded."""
    model = LlamaForCausalLM(exact.config)
    model.load_state_dict(exact.state_dict())
    model.to(dtype).save_pretrained(folder)
    return folder


def plain(model: Any, row: Row) -> torch.Tensor:
    """Log-probabilities in FP64 by their definition."""
    with torch.no_grad():
        logits = model(input_ids=ids_of(row)[None]).logits[0].double()
    return logits - logits.exp().sum(dim=-1, keepdim=True).log()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gap_is_that_of_the_definition(exact: Any, rows: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    found = measure(exact, exported(exact, tmp_path, dtype), rows, **CAUSAL)
    for compute, facts in ((dtype, found), (torch.float32, found["of rounding alone"])):
        model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=compute).eval()
        pairs = [(plain(exact, row), plain(model, row)) for row in rows]
        kl = [(p.exp() * (p - q)).sum(dim=-1) for p, q in pairs]
        difference = [(p - q).abs().amax(dim=-1) for p, q in pairs]
        assert facts["kl"] == pytest.approx(float(torch.cat(kl).mean()), rel=1e-6)
        assert facts["largest kl"] == pytest.approx(float(torch.cat(kl).max()), rel=1e-6)
        assert facts["largest difference"] == pytest.approx(float(torch.cat(difference).max()), rel=1e-6)
        if facts is found:
            follow = [
                (p - q).abs()[:-1].gather(1, ids_of(row)[1:, None]) for (p, q), row in zip(pairs, rows, strict=True)
            ]
            assert facts["largest difference of the row's tokens"] == pytest.approx(float(torch.cat(follow).max()))
            worst = max(range(3), key=lambda number: float(kl[number].max()))
            assert facts["worst"] == {"row": worst, "position": int(kl[worst].argmax())}
            assert list(facts["by position"]) == ["0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64-99"]
            assert facts["by position"]["2-3"]["kl"] == pytest.approx(float(torch.cat([k[2:4] for k in kl]).mean()))
            assert facts["by position"]["64-99"]["largest difference"] == pytest.approx(float(difference[0][64:].max()))
    assert found["tokens"] == 123
    assert 0 < found["of rounding alone"]["kl"] < found["kl"] < 0.1


def test_a_token_that_one_model_rules_out_is_a_gap_that_is_not_finite() -> None:
    logits = torch.zeros(1, 2, 3)
    other = logits.clone()
    other[0, 1, 2] = -math.inf
    exact, found = (lambda value=value, **given: SimpleNamespace(logits=value) for value in (logits, other))
    gap = row_gap(exact, found, Row.of_text(torch.tensor([0, 1])))
    assert gap.kl.tolist() == gap.difference.tolist() == [0, math.inf]


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma3_text", "mixtral"])
def test_the_masters_model_is_the_architecture_s_own(rows: Any, tmp_path: Path, family: str) -> None:
    """Buffers, tied weights and scaled embeddings included: an FP32 export computes the same to the last bit."""
    model = small_model(family).eval()
    model.save_pretrained(tmp_path)
    tensors = {name: SavedTensor(value.shape, value.detach().clone) for name, value in model.named_parameters()}
    saved = SavedModel(stage=2, ranks=1, tensors=tensors)
    masters = of_masters(saved, AutoConfig.from_pretrained(tmp_path), **CAUSAL)
    short = [Row.of_text(ids_of(row)[:30] % 61) for row in rows]
    found = measure(masters, tmp_path, short, **CAUSAL)
    assert found["largest kl"] == found["largest difference"] == 0
    require_within(found, Bounds(kl=0.0, difference=0.0))
    assert all(entry["own error"] == 0 for entry in found["modules"])
    model.bfloat16().save_pretrained(tmp_path)
    half = measure(masters, tmp_path, short, **CAUSAL)
    assert half["kl"] == half["of the masters rounded"]["kl"] > 0


def coarse(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.float8_e4m3fn).to(weight.dtype)


def in_bf16(weight: torch.Tensor) -> torch.Tensor:
    return weight.bfloat16().float()


def not_finite(weight: torch.Tensor) -> torch.Tensor:
    return weight * math.nan


@pytest.mark.parametrize(
    ("dtype", "module", "damage"),
    [
        (torch.bfloat16, "model.layers.1.self_attn.v_proj", coarse),
        (torch.bfloat16, "model.layers.0.mlp.down_proj", coarse),
        (torch.float32, "model.layers.1.post_attention_layernorm", in_bf16),
        (torch.float32, "model.layers.0.mlp.up_proj", in_bf16),
        (torch.bfloat16, "model.layers.0.input_layernorm", not_finite),
    ],
)
def test_a_wrong_weight_is_found_and_named(exact, rows, tmp_path, dtype, module, damage) -> None:
    good = measure(exact, exported(exact, tmp_path, dtype), rows, **CAUSAL)
    require_within(good, bounds := Bounds(kl=1.5 * good["largest kl"]))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{module}.weight"] = damage(tensors[f"{module}.weight"])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    wrong = measure(exact, tmp_path, rows, **CAUSAL)
    assert wrong["modules"][0]["module"] == module
    assert wrong["largest kl"] > 1.5 * good["largest kl"]
    with pytest.raises(GapTooLarge, match=re.escape(f"{module} has the largest error of its own")):
        require_within(wrong, bounds)
    with pytest.raises(GapTooLarge):
        require_within(wrong, Bounds())  # also without a bound of its own
    if damage is not_finite:
        with pytest.raises(GapTooLarge, match="is not finite"):
            require_within(wrong, Bounds())


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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["sequence", "token", "mlm", "seq2seq"])
def test_the_gap_is_that_of_plain_transformers_at_each_label(folder, checkpoints, tmp_path, kind, capsys) -> None:
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


def test_the_gap_of_a_number_is_its_difference(folder, checkpoints, tmp_path, capsys) -> None:
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
def test_a_long_row_is_cut_with_its_labels(folder, checkpoints, kind, monkeypatch) -> None:
    source = source_of(checkpoints(kind))
    given = (str(others(folder, kind)), source.config, source.tokenizer)
    whole = rows_of_data(*given)
    monkeypatch.setattr("tools.export_hf.rows._TOKENS", 6)
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
