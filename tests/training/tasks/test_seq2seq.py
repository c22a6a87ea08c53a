"""Encoder-decoders through the engine equal plain torch on the same rows, one at a time; and all that follows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.support.jobs.process_group import ProcessGroup
from tests.support.jobs.task_jobs import overrides_of
from tests.support.marks import slow
from tests.support.models.plain_steps import require_equal
from tests.support.rows.seq2seq import FAMILIES, write_rows
from tests.support.runs import exports
from tests.training.checkpoint import resume_cases
from tests.training.tasks import seq2seq_cases as cases
from tools.generate import main as generate
from training.checkpoint.partitions import open_saved_model

CELLS = [
    pytest.param(family, stage, loss, marks=() if (family, stage) == ("t5-v1.1", 3) else pytest.mark.slow)
    for family in FAMILIES
    for stage, loss in ((0, "full"), (1, "chunked"), (2, "full"), (3, "chunked"))
]


@pytest.mark.parametrize(("family", "stage", "loss"), CELLS)
def test_one_and_two_ranks_equal_plain_torch(
    pair: ProcessGroup, solo: ProcessGroup, sides: Path, family: str, stage: int, loss: str
) -> None:
    given = (f"model.loss={loss}", *(("model.loss_chunk_tokens=16",) if loss == "chunked" else ()))
    found, other = pair.run(cases.steps, folder=sides, family=family, stage=stage, overrides=given)
    assert found["chunked"] == (loss == "chunked")
    assert ("lm_head.weight" in found["after"]) == (family == "t5-v1.1")
    assert [step["loss"] for step in other["steps"]] == [step["loss"] for step in found["steps"]]
    [alone] = solo.run(cases.steps, folder=sides, family=family, stage=stage, overrides=given)
    exact = cases.oracle(sides, found, family=family)
    require_equal(found, exact)
    require_equal(alone, exact)


@pytest.mark.parametrize(("family", "loss"), [("t5", "full"), slow("bart", "chunked")])
def test_each_source_and_each_set_has_the_loss_of_plain_torch(
    pair: ProcessGroup, solo: ProcessGroup, sides: Path, family: str, loss: str
) -> None:
    write_rows(sides / "more.jsonl", 30, seed=1)
    for seed, name in enumerate(("first", "second"), 2):
        write_rows(sides / f"{name}.jsonl", 11, seed=seed)
    files = [(f"{sides}/{name}.jsonl", name) for name in ("rows", "more", "first", "second")]
    named = [f"{{path: {path}, name: {name}}}" for path, name in files]
    given = ("data.path=null", f"data.sources=[{', '.join(named[:2])}]", f"data.validation=[{', '.join(named[2:])}]")
    given = (*given, "evaluate={every_steps: 1, batches: 3}", f"model.loss={loss}")
    [alone] = solo.run(cases.mixture, folder=sides, family=family, stage=0, overrides=given)
    found, _ = pair.run(cases.mixture, folder=sides, family=family, stage=2, overrides=given)
    assert found["rows"] == alone["rows"] and found["chunked"] == (loss == "chunked")
    assert found["sets"].keys() == {"first", "second"}

    rows = {name: [json.loads(line) for line in Path(path).read_text().splitlines()] for path, name in files}
    trained = {
        name: cases.plain_losses(sides, family, [rows[name][number] for number in numbers])
        for name, numbers in found["rows"].items()
    }
    held_out = {name: cases.plain_losses(sides, family, rows[name]) for name in ("first", "second")}
    for mine in (found, alone):
        assert mine["loss"] == pytest.approx(mean(trained), rel=1e-5)
        assert mine["loss_by_source"] == pytest.approx(
            {name: mean({name: one}) for name, one in trained.items()}, rel=1e-5
        )
        assert mine["labels"] == [{name: int(count) for name, (_, count, _) in trained.items()}] * 2
        assert mine["whole"] == pytest.approx(mean(held_out), rel=1e-5)
        for name, (total, count, right) in held_out.items():
            assert mine["sets"][name].loss == pytest.approx(float(total / count), rel=1e-5)
            assert mine["sets"][name].metrics == {"token_accuracy": float(right / count)}
    assert abs(mean({"": trained["rows"]}) / mean({"": trained["more"]}) - 1) > 1e-4, "they differ"


def mean(sums: dict[str, torch.Tensor]) -> float:
    """Mean over all labels of what `plain_losses` returns."""
    total, count, _ = sum(sums.values(), torch.zeros(3, dtype=torch.float64))
    return float(total / count)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["t5-v1.1", "bart", "t5"])
def test_an_export_loads_in_transformers_with_equal_logits(
    pair: ProcessGroup, sides: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = job(sides, family, "precision.compute=bf16", "deepspeed.stage=2")
    checkpoint = resume_cases.checkpoint_of(pair, sides, f"{family}-export", overrides)
    exported(sides, checkpoint, family)
    answer_of_the_export(sides / f"{family}-export", capsys)


def job(sides: Path, family: str, *overrides: str) -> list[str]:
    """Overrides of `resume_cases.resolve`."""
    given = [*overrides_of(sides, "seq2seq"), f"model.name_or_path={sides}/{family}", f"data.path={sides}/rows.jsonl"]
    return [*given, *overrides]


def exported(sides: Path, checkpoint: Path, family: str) -> None:
    """The export has the masters, loads in transformers, and its logits are those of plain transformers with them."""
    out = sides / f"{family}-export"
    exports.exported(checkpoint, out)
    loaded: Any = AutoModelForSeq2SeqLM.from_pretrained(out)
    saved = open_saved_model(checkpoint / "deepspeed")
    plain: Any = AutoModelForSeq2SeqLM.from_pretrained(sides / family)
    first = plain(**asked(sides, family)).logits
    plain.load_state_dict({key: tensor.read() for key, tensor in saved.tensors.items()}, strict=False)
    with torch.no_grad():
        assert torch.equal(loaded(**asked(sides, family)).logits, plain.eval()(**asked(sides, family)).logits)
        assert not torch.allclose(first, plain(**asked(sides, family)).logits, atol=0.01)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == (family != "t5-v1.1")
    assert loaded.config.decoder_start_token_id == loaded.generation_config.decoder_start_token_id is not None
    assert "AutoModelForSeq2SeqLM.from_pretrained(FOLDER" in (out / "README.md").read_text()


def asked(sides: Path, family: str) -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(sides / family)
    inputs = tokenizer(["a model", "the loss"], padding=True, return_tensors="pt")
    return {**inputs, "decoder_input_ids": torch.tensor([[1, 5, 6], [1, 7, 8]])}


def answer_of_the_export(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`tools.generate` says what `generate` of transformers says to the same source."""
    assert generate([str(out), "--prompt", "a model loss", "--tokens", "8"]) == 0
    said = capsys.readouterr().out
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    found = model.generate(**tokenizer("a model loss", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    assert said == tokenizer.decode(found[0], skip_special_tokens=True) + "\n"
