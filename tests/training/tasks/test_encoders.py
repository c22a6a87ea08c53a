"""Encoders get what causal models get: resume, export, attribution, parity, telemetry, manifests."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from tests.support.jobs.process_group import ProcessGroup
from tests.support.rows.labelled import FAMILIES, LABELS, LENGTH, sizes
from tests.support.runs.exports import exported
from tests.training.checkpoint import resume_cases
from tests.training.checkpoint.resume_cases import FP16, OVERFLOW
from tests.training.tasks import classify_cases as cases
from tests.training.tasks.mlm_cases import mlm
from tools.generate import main as generate
from tracking.compare.surviving import read_events
from training.checkpoint.partitions import open_saved_model

JOB = ["model.architecture=null", "model.name_or_path={folder}/bert", "data.source=auto", "data.tokenizer=model"]
ROWS = ["task=classify", "data.path={folder}/{kind}.jsonl", f"data.sequence_length={LENGTH}"]
TEXT = ["task=mlm", "data.source=text", "data.path={folder}/text", "data.sequence_length=32"]
DROPOUT = "model.config={hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1}"
LORA = "adapter={kind: lora, r: 4, dropout: 0.1}"
JOBS = {
    "sequence, BF16, ZeRO-3": [*ROWS, "precision.compute=bf16", "deepspeed.stage=3", DROPOUT],
    "mlm, FP16, ZeRO-2, an overflow": [*TEXT, *FP16, *OVERFLOW, "deepspeed.stage=2", DROPOUT],
    "token, FP16, ZeRO-1, an overflow": [
        *(*ROWS, "classify.kind=token", *FP16, *OVERFLOW),
        *("deepspeed.stage=1", DROPOUT),
    ],
    "regression, BF16, ZeRO-2": [*ROWS, "classify.kind=regression", "precision.compute=bf16", "deepspeed.stage=2"],
    "sequence, LoRA, BF16, ZeRO-3": [*ROWS, LORA, "precision.compute=bf16", "deepspeed.stage=3", DROPOUT],
    "mlm, LoRA, FP16, ZeRO-2, an overflow": [
        *(*TEXT, LORA[:-1] + ", modules_to_save: [cls]}", *FP16, *OVERFLOW),
        *("deepspeed.stage=2", DROPOUT),
    ],
    "regression, DoRA, BF16, ZeRO-2": [
        *(*ROWS, "classify.kind=regression", "precision.compute=bf16", "deepspeed.stage=2"),
        "adapter={kind: dora, r: 4}",
    ],
}


def job(encoders: Path, what: str) -> tuple[list[str], str]:
    """Overrides of `resume_cases.resolve`, and a name."""
    kind = what.partition(",")[0]
    own = [item for item in JOB if not item.startswith("data.source") or "mlm" not in what]
    overrides = [item.replace("{folder}", str(encoders)).replace("{kind}", kind) for item in [*own, *JOBS[what]]]
    given = [] if DROPOUT in overrides else ["model.config={}"]
    return [*overrides, *given, "data.validation_fraction=0.2"], resume_cases.name_of(what)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("what", JOBS)
def test_a_job_that_breaks_off_ends_as_one_that_does_not(pair: ProcessGroup, encoders: Path, what: str) -> None:
    overrides, name = job(encoders, what)
    overrides = [*overrides, "evaluate={every_steps: 5, batches: 8}"]
    resume_cases.ends_as_whole(pair, encoders, what, overrides, breaks=(14,), seconds=400.0)
    events = list(read_events(encoders / "runs" / name / "events.jsonl"))
    evaluated = [event for event in events if event["event"] == "eval"]
    if "mlm" in what:
        assert all(event["perplexity"] > 1 for event in evaluated)
    else:
        measured = {"pearson", "rmse"} if "regression" in what else {"accuracy", "macro_f1", "matthews"}
        assert [event["metrics"].keys() for event in evaluated] == [measured] * 2
        assert {event["perplexity"] for event in evaluated} == {None}


AUTO = {"mlm": "AutoModelForMaskedLM", "token": "AutoModelForTokenClassification"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", ["sequence, BF16, ZeRO-3", "mlm, FP16, ZeRO-2, an overflow"])
def test_an_export_loads_in_transformers_with_equal_logits(
    pair: ProcessGroup, encoders: Path, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, name = job(encoders, what)
    overrides += ["run.steps=2", "optimizer.learning_rate=0.01", "guard.spike_sigmas=0", "faults=[]"]
    pair.run(resume_cases.job, folder=str(encoders), name=f"{name}-export", overrides=overrides, passes=None)
    checkpoint = encoders / "runs" / f"{name}-export" / "checkpoints" / "step-2"
    facts, _ = exported(checkpoint, tmp_path / "out")
    auto = getattr(transformers, AUTO.get(what.partition(",")[0], "AutoModelForSequenceClassification"))
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
    if "sequence" in what:
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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["sequence", "regression", "mlm"])
def test_single_steps_are_compared_with_fp32(pair: ProcessGroup, encoders: Path, kind: str) -> None:
    options: dict[str, Any] = (
        {"folder": encoders, "overrides": mlm(encoders)} if kind == "mlm" else {"folder": encoders}
    )
    options |= {} if kind == "mlm" else {"kind": kind}
    [exact], _ = pair.run(cases.parity_steps, **options)
    assert exact["loss"] == pytest.approx(exact["reference_loss"], rel=1e-6)
    assert exact["grad_norm"] == pytest.approx(exact["reference_grad_norm"], rel=1e-5)
    assert max(exact["update_error"].values()) < 1e-3
    [half], _ = pair.run(cases.parity_steps, compute="bf16", **options)
    # with numbers around 300 to predict, labels in BF16 would be wrong by a third of their spread
    assert half["loss"] == pytest.approx(half["reference_loss"], rel=1e-4 if kind == "regression" else 0.01)
    assert max(half["drift"].values()) == 0


def test_building_the_reference_draws_no_random_number_of_the_run(pair: ProcessGroup, encoders: Path) -> None:
    """Else a run's first step, made again with its dropout, would drop others: a head that is new is drawn twice."""
    assert all(pair.run(cases.generators_after_the_reference, folder=encoders, overrides=(DROPOUT,)))


def test_telemetry_attribution_and_regions(pair: ProcessGroup, encoders: Path, tmp_path: Path) -> None:
    found = pair.run(cases.telemetry, folder=encoders, compute="bf16", overrides=(DROPOUT,))[0]
    assert found["drift"]["maximum"] == 0
    # a bias of attention's keys changes nothing, so its gradient is rounding
    cosines = {name: agreement["cosine"] for name, agreement in found["probe"].items() if "key.bias" not in name}
    assert min(cosines.values()) > 0.9, cosines
    module = "bert.encoder.layer.1.output.dense"
    fault = f"faults=[{{kind: nan_gradient, step: 1, rank: 1, module: {module}}}]"
    (rank, finding), *_ = pair.run(cases.causes, folder=encoders, compute="bf16", overrides=(fault,))[0]
    assert rank == 1
    assert module in finding.module
    path = tmp_path / "manifest.json"
    rule = {"match": "classifier", "compute": "fp32", "reason": "a test"}
    path.write_text(json.dumps({"default": "bf16", "rules": [rule]}))
    regions = pair.run(cases.regions, folder=encoders, overrides=(f"precision.manifest={path}",))[0]
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
