"""Encoder-decoders and adapters on them equal plain torch and peft on the same rows; and all that follows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSeq2SeqLM
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.support.jobs.process_group import ProcessGroup
from tests.support.jobs.task_jobs import overrides_of
from tests.support.marks import slow
from tests.support.models.plain_steps import require_equal
from tests.support.rows.seq2seq import FAMILIES, write_rows
from tests.support.runs import exports
from tests.support.runs.exports import exported_adapter
from tests.training.checkpoint import resume_cases
from tests.training.tasks import seq2seq_cases as cases
from tests.training.tasks import sft_cases
from tests.training.tasks.sft_cases import LORA
from tools.generate import main as generate
from training.checkpoint.partitions import open_saved_model

CELLS = [
    pytest.param(family, stage, loss, marks=() if (family, stage) == ("t5-v1.1", 3) else pytest.mark.slow)
    for family in FAMILIES
    for stage, loss in ((0, "full"), (1, "chunked"), (2, "full"), (3, "chunked"))
]


@pytest.mark.parametrize(("family", "stage", "loss"), CELLS)
def test_one_and_two_ranks_equal_plain_torch(pair, solo, sides, family, stage, loss) -> None:
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
def test_each_source_and_each_set_has_the_loss_of_plain_torch(pair, solo, sides, family, loss) -> None:
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
def test_an_export_loads_in_transformers_with_equal_logits(pair, sides, family, capsys) -> None:
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


GIVEN = {**sft_cases.GIVEN, "task_type": "SEQ_2_SEQ_LM"}
ADAPTED: dict[str, tuple[str, int, str, dict[str, Any]]] = {
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
@pytest.mark.parametrize("what", ADAPTED)
def test_one_and_two_ranks_equal_plain_peft(pair: ProcessGroup, solo: ProcessGroup, sides: Path, what: str) -> None:
    family, stage, adapter, given = ADAPTED[what]
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
def test_an_export_is_a_folder_of_plain_peft_and_a_merged_model(pair, sides, tmp_path, family, capsys) -> None:
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
