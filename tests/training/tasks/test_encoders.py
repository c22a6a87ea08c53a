"""Encoders get what causal models get: starts, exports, manifests, validation, several sources, adapters."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from config.schema import Config, ModelSection
from tests.support.jobs.process_group import ProcessGroup
from tests.support.jobs.task_jobs import overrides_of
from tests.support.models import plain_steps
from tests.support.models.small_run import manifest_of
from tests.support.rows.labelled import FAMILIES, LABELS, sizes, tokenizer, write_rows
from tests.support.runs.exports import exported, exported_adapter
from tests.training.checkpoint import resume_cases
from tests.training.tasks import classify_cases as cases
from tests.training.tasks import mlm_cases, sft_cases
from tests.training.tasks.mlm_cases import mlm
from tests.training.tasks.sft_cases import GIVEN, LORA
from tests.training.tasks.test_classify import require_equal
from tools.generate import main as generate
from training.checkpoint.partitions import open_saved_model
from training.tasks.shape import given_by_task
from training.tasks.task import prepare

DROPOUT = "model.config={hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1}"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", ["classify", "mlm"])
def test_an_export_loads_in_transformers_with_equal_logits(pair, every_task, tmp_path, what, capsys) -> None:
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
def test_it_starts_from_the_folder_and_draws_only_what_that_lacks(pair, encoders, kind) -> None:
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


def test_the_padding_token_of_a_saved_model_is_its_tokenizer_s() -> None:
    config = Config(task="classify", model=ModelSection(name_or_path="qwen"))
    assert given_by_task(config, SimpleNamespace(pad_token_id=7))["pad_token_id"] == 7


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
    """A head that is new is drawn twice; a run's first step, made again, still drops the same values."""
    assert all(pair.run(cases.generators_after_the_reference, folder=encoders, overrides=(DROPOUT,)))


def test_rules_of_a_manifest_reach_the_head(pair: ProcessGroup, encoders: Path, tmp_path: Path) -> None:
    rule = {"match": "classifier", "compute": "fp32", "reason": "a test"}
    given = tuple(manifest_of(tmp_path, {"default": "bf16", "rules": [rule]}))
    regions = pair.run(sft_cases.regions, resolve=cases.resolve, folder=encoders, overrides=given)[0]
    assert regions["dtypes"]["classifier"] == "fp32"
    assert regions["dtypes"]["bert.encoder.layer.0.output.dense"] == "bf16"
    assert all(loss < 10 for loss in regions["losses"])


def test_validation_metrics_depend_neither_on_layout_nor_on_global_size(pair, solo, encoders) -> None:
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


OTHER = ("new", "odd", "good")
"""Labels of the second source: one of its own, in another order."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["sequence", "token", "regression"])
def test_each_source_has_its_loss_under_one_numbering(pair, solo, encoders, kind) -> None:
    second = write_rows(encoders / f"{kind}-second.jsonl", kind, 40, seed=1, pair=kind != "token", labels=OTHER)
    sources = f"[{{path: {encoders}/{kind}.jsonl, name: a}}, {{path: {second}, name: b}}]"
    given = ("data.path=null", f"data.sources={sources}")
    [alone] = solo.run(cases.mixture, folder=encoders, kind=kind, overrides=given)
    found, _ = pair.run(cases.mixture, folder=encoders, kind=kind, overrides=given)
    for key in ("loss", "loss_by_source"):
        assert found[key] == pytest.approx(alone[key], rel=1e-6)
    assert found["labels_by_source"] == found["counts_by_source"] == alone["counts_by_source"]
    names = ["number"] if kind == "regression" else ["bad", "good", "new", "odd"]
    assert kind == "regression" or found["names"] == names
    net: Any = getattr(transformers, cases.AUTO[kind]).from_pretrained(encoders / "bert", num_labels=len(names))
    net = sft_cases.trained_from(net, found["before"], None).eval()
    tokenizer = AutoTokenizer.from_pretrained(encoders / "bert")
    total, count = 0.0, 0
    for name, path in (("a", encoders / f"{kind}.jsonl"), ("b", second)):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        mine = [int(s) for s in found["samples"][1] if (s >= found["first"]) == (name == "b")]
        losses, labels = 0.0, 0
        for number in mine:
            row = rows[number - (found["first"] if name == "b" else 0)]
            inputs, target = cases.example(tokenizer, row, kind, names, pair=False)
            with torch.no_grad():
                logits = net(**inputs).logits.float()
            if kind == "regression":
                losses, labels = losses + float((logits.view(()) - target) ** 2), labels + 1
            else:
                logits = logits.reshape(-1, len(names))
                losses += float(cross_entropy(logits, target, ignore_index=-100, reduction="sum"))
                labels += int((target != -100).sum())
        assert labels == found["labels_by_source"][name] > 0
        assert found["loss_by_source"][name] == pytest.approx(losses / labels, rel=1e-5)
        total, count = total + losses, count + labels
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)


def test_a_masked_language_model_counts_what_is_hidden_of_each_source(pair, solo, encoders) -> None:
    if not (encoders / "more").exists():
        mlm_cases.write_text(encoders / "more", 10, seed=1)
    sources = f"[{{path: {encoders}/text, source: text, name: a}}, {{path: {encoders}/more, source: text, name: b}}]"
    given = (*mlm_cases.mlm(encoders), "data.path=null", f"data.sources={sources}", "data.workers=1")
    prepare(cases.resolve(encoders, overrides=given).config, progress=False)  # which starts processes
    [found] = solo.run(cases.mixture, folder=encoders, overrides=given)
    both, _ = pair.run(cases.mixture, folder=encoders, overrides=given)
    assert both["counts_by_source"] == found["counts_by_source"]
    assert both["loss_by_source"] == pytest.approx(found["loss_by_source"], rel=1e-6)
    assert found["held out"].keys() == {"a", "b"}
    [(seen, labels, owners)] = found["seen"]
    net = transformers.AutoModelForMaskedLM.from_pretrained(encoders / "bert")
    net = sft_cases.trained_from(net, found["before"], None).eval()
    for number, name in enumerate(("a", "b")):
        mine = owners == number
        assert found["counts_by_source"][name] == int((labels[mine] != -100).sum()) > 0
        with torch.no_grad():
            logits = net(input_ids=seen[mine]).logits.flatten(0, 1)
        exact = float(cross_entropy(logits, labels[mine].flatten(), ignore_index=-100))
        assert found["loss_by_source"][name] == pytest.approx(exact, rel=1e-5)


CELLS: list[tuple[str, str, str, dict[str, Any]]] = [
    # the files of a masked language model have no pooler, which plain peft has to be told
    ("sequence", "bert", LORA, {**GIVEN, "task_type": "SEQ_CLS", "modules_to_save": ["pooler"]}),
    ("token", "modernbert", LORA, {**GIVEN, "task_type": "TOKEN_CLS", "modules_to_save": ["classifier"]}),
    (
        *("regression", "deberta-v2", "adapter={kind: dora, r: 4, alpha: 8, target_modules: [query_proj, value_proj]}"),
        {**GIVEN, "target_modules": ["query_proj", "value_proj"], "use_dora": True}
        | {"task_type": "SEQ_CLS", "modules_to_save": ["pooler"]},
    ),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "family", "adapter", "given"), CELLS)
def test_a_classifier_equals_plain_peft(pair, encoders, kind, family, adapter, given) -> None:
    overrides, exact = (f"model.name_or_path={encoders}/{family}", adapter), None
    for stage in (2, 3):
        found, *_ = pair.run(cases.steps, folder=encoders, kind=kind, stage=stage, overrides=overrides)
        exact = exact or cases.oracle(encoders, found, kind=kind, model=family, adapter=given)
        require_equal(found, exact, kind)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("whole", ["[]", "[cls]"])
def test_a_masked_language_model_equals_plain_peft(pair: ProcessGroup, encoders: Path, whole: str) -> None:
    overrides = (LORA[:-1] + f", modules_to_save: {whole}}}",)
    given = {**GIVEN, "modules_to_save": ["cls"] if whole == "[cls]" else None}
    found, *_ = pair.run(mlm_cases.steps, folder=encoders, stage=2, overrides=overrides)
    exact = mlm_cases.oracle(encoders, "bert", found, given)
    plain_steps.require_equal(found, exact)


@pytest.mark.slow
def test_a_head_that_would_stay_as_drawn_is_refused_or_trained(solo: ProcessGroup, encoders: Path) -> None:
    """Files of a model without a head, whose output bias shares its module with a tied embedding."""
    bare = (*mlm_cases.mlm(encoders), f"model.name_or_path={encoders}/bare")
    with pytest.raises(AssertionError, match="has no cls.predictions.bias, which stays at random values"):
        solo.run(cases.start, folder=encoders, overrides=(*bare, LORA))
    named = LORA[:-1] + ", modules_to_save: [cls.predictions]}"
    [started] = solo.run(cases.start, folder=encoders, overrides=(*bare, named))
    assert "cls.predictions.modules_to_save.default.transform.dense.weight" in started["masters"]


JOBS = {
    "classify, LoRA": [],
    "mlm, LoRA": [],
    "classify, regression": ["deepspeed.stage=2", "adapter={kind: dora, r: 4}"],
}
"""Jobs of `task_jobs`, and what is other here."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("what", JOBS)
def test_an_export_is_a_folder_of_plain_peft_and_a_merged_model(pair, every_task, tmp_path, what, capsys) -> None:
    """The masters of adapter and head are exported: equal logits in plain `peft` and in plain transformers."""
    overrides = [*overrides_of(every_task, what), *JOBS[what]]
    checkpoint = resume_cases.checkpoint_of(pair, every_task, f"{resume_cases.name_of(what)}-export", overrides)
    labels = 1 if "regression" in what else len(LABELS)
    given = {"dtype": torch.float16} if "mlm" in what else {"dtype": torch.bfloat16, "num_labels": labels}
    inputs = tokenizer()(["a model lossing", "a rank"], padding=True, return_tensors="pt")
    facts, saved, merged, _ = exported_adapter(
        checkpoint, tmp_path, lambda auto: auto.from_pretrained(every_task / "encoder", **given), inputs
    )
    assert ("classifier.modules_to_save.default.weight" in saved) == ("mlm" not in what)
    if what == "classify, LoRA":
        assert merged.config.id2label == facts["adapter"]["labels"] == dict(enumerate(sorted(LABELS)))
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert (
        f"{facts['model']['auto_class']}.from_pretrained(" in card and "PeftModel.from_pretrained(base, FOLDER)" in card
    )
    assert generate([str(tmp_path / "adapter"), "--prompt", "a"]) == 2
    assert "is an adapter of an encoder, which generates no text" in capsys.readouterr().err
