"""Encoders get what causal models get: starts, exports, manifests, validation."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from tests.support.jobs.process_group import ProcessGroup
from tests.support.jobs.task_jobs import overrides_of
from tests.support.models.small_run import manifest_of
from tests.support.rows.labelled import FAMILIES, LABELS, sizes
from tests.support.runs.exports import exported
from tests.training.checkpoint import resume_cases
from tests.training.tasks import classify_cases as cases
from tests.training.tasks import sft_cases
from tests.training.tasks.mlm_cases import mlm
from tools.generate import main as generate
from training.checkpoint.partitions import open_saved_model

DROPOUT = "model.config={hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1}"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", ["classify", "mlm"])
def test_an_export_loads_in_transformers_with_equal_logits(
    pair: ProcessGroup, every_task: Path, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = resume_cases.checkpoint_of(pair, every_task, f"{what}-export", overrides_of(every_task, what))
    facts, _ = exported(checkpoint, tmp_path / "out")
    auto = getattr(transformers, {"mlm": "AutoModelForMaskedLM"}.get(what, "AutoModelForSequenceClassification"))
    loaded = auto.from_pretrained(tmp_path / "out").eval()
    saved = open_saved_model(checkpoint / "deepspeed")
    plain = auto.from_config(loaded.config).eval()
    plain.load_state_dict({name: tensor.read().float() for name, tensor in saved.tensors.items()}, strict=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    inputs = tokenizer(["a model lossing", "a rank"], padding=True, return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, plain(**inputs).logits)
    assert not (tmp_path / "out" / "generation_config.json").exists()
    assert facts["model"]["auto_class"] == auto.__name__
    assert f"{auto.__name__}.from_pretrained(FOLDER" in (tmp_path / "out" / "README.md").read_text()
    if what == "classify":
        assert loaded.config.id2label == dict(enumerate(sorted(LABELS)))
    assert generate([str(tmp_path / "out"), "--prompt", "a"]) == 2
    assert "which generates no text; use it in transformers" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["sequence", "mlm"])
def test_it_starts_from_the_folder_and_draws_only_what_that_lacks(
    pair: ProcessGroup, encoders: Path, kind: str
) -> None:
    """The masters are the folder's numbers, unrounded, in BF16; the head is the same at every stage, on every rank."""
    found = []
    for stage in (2, 3):
        given = mlm(encoders) if kind == "mlm" else ()
        overrides = (*given, f"model.name_or_path={encoders}/bare")
        started = pair.run(cases.start, folder=encoders, stage=stage, compute="bf16", overrides=overrides)
        assert started[0]["notes"] == started[1]["notes"]
        [note] = [line for line in started[0]["notes"] if "initialised with run.seed" in line]
        assert ("classifier.weight" if kind == "sequence" else "cls.predictions") in note
        assert "encoder.layer" not in note
        found.append(started[0]["masters"])
    base = dict(transformers.AutoModel.from_pretrained(encoders / "bare").named_parameters())
    for name, value in base.items():
        own = f"bert.{name}"
        if own in found[0]:  # a masked language model has no pooler
            assert torch.equal(found[0][own], value.detach()), own
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_encoder_is_the_same_at_every_stage(pair: ProcessGroup, encoders: Path, family: str) -> None:
    config = json.dumps(sizes(family))
    new = ("model.name_or_path=null", f"model.architecture={family}", f"model.config={config}")
    new = (*new, f"data.tokenizer={encoders}/bert")
    two, three = (pair.run(cases.start, folder=encoders, stage=stage, overrides=new)[0] for stage in (2, 3))
    for name, value in two["masters"].items():
        assert torch.equal(value, three["masters"][name]), name
    assert two["config"]["id2label"] == dict(enumerate(sorted(LABELS)))
    assert two["config"]["pad_token_id"] == 0


def test_building_the_reference_draws_no_random_number_of_the_run(pair: ProcessGroup, encoders: Path) -> None:
    """Else a run's first step, made again with its dropout, would drop others: a head that is new is drawn twice."""
    assert all(pair.run(cases.generators_after_the_reference, folder=encoders, overrides=(DROPOUT,)))


def test_rules_of_a_manifest_reach_the_head(pair: ProcessGroup, encoders: Path, tmp_path: Path) -> None:
    rule = {"match": "classifier", "compute": "fp32", "reason": "a test"}
    given = tuple(manifest_of(tmp_path, {"default": "bf16", "rules": [rule]}))
    regions = pair.run(sft_cases.regions, resolve=cases.resolve, folder=encoders, overrides=given)[0]
    assert regions["dtypes"]["classifier"] == "fp32"
    assert regions["dtypes"]["bert.encoder.layer.0.output.dense"] == "bf16"
    assert all(loss < 10 for loss in regions["losses"])


def test_validation_metrics_depend_neither_on_layout_nor_on_global_size(
    pair: ProcessGroup, solo: ProcessGroup, encoders: Path
) -> None:
    """More rows are held out than eight of either global batch, which is as far as other tasks go."""
    for kind in ("sequence", "token", "regression"):
        given = ("data.validation_fraction=0.5", "evaluate={every_steps: 1, batches: auto}")
        [two, _], [one] = (
            group.run(
                cases.evaluate,
                folder=encoders,
                kind=kind,
                overrides=(*given, f"batch.global_size={size}", f"batch.micro_size={micro}"),
            )
            for group, size, micro in ((pair, 2, 1), (solo, 3, 3))
        )
        assert two["held out"] == one["held out"] > 8 * 3
        assert two["left out"] is one["left out"] is None
        assert two["perplexity"] is None
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
        if kind == "regression":
            assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-3)
        else:
            assert two["metrics"] == one["metrics"]


def test_labels_in_another_order_are_the_same_task(solo: ProcessGroup, encoders: Path) -> None:
    order = "[odd, good, bad, never]"
    [started] = solo.run(cases.start, folder=encoders, overrides=(f"classify.labels={order}",))
    assert list(started["config"]["id2label"].values()) == ["odd", "good", "bad", "never"]
    assert started["masters"]["classifier.weight"].shape[0] == 4
    with pytest.raises(AssertionError, match="classify.labels: lacks 'bad', which rows of data.path="):
        solo.run(cases.start, folder=encoders, overrides=("classify.labels=[odd, good]",))
