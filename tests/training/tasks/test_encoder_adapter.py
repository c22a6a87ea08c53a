"""Adapters on encoders equal plain torch with plain peft; a head that is new is trained whole and saved with them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs.process_group import ProcessGroup
from tests.support.jobs.task_jobs import overrides_of
from tests.support.models import plain_steps
from tests.support.rows.labelled import LABELS, tokenizer
from tests.support.runs.exports import exported_adapter
from tests.training.checkpoint import resume_cases
from tests.training.tasks import classify_cases as cases
from tests.training.tasks import mlm_cases
from tests.training.tasks.test_classify import require_equal
from tools.generate import main as generate

LORA = "adapter={kind: lora, r: 4, alpha: 8}"
GIVEN = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
CELLS: list[tuple[str, str, str, dict[str, Any]]] = [
    # the files of a masked language model have no pooler, which plain peft has to be told
    ("sequence", "bert", LORA, {**GIVEN, "task_type": "SEQ_CLS", "modules_to_save": ["pooler"]}),
    ("token", "modernbert", LORA, {**GIVEN, "task_type": "TOKEN_CLS", "modules_to_save": ["classifier"]}),
    (
        "regression",
        "deberta-v2",
        "adapter={kind: dora, r: 4, alpha: 8, target_modules: [query_proj, value_proj]}",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["query_proj", "value_proj"],
            "use_dora": True,
            "task_type": "SEQ_CLS",
            "modules_to_save": ["pooler"],
        },
    ),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "family", "adapter", "given"), CELLS)
def test_a_classifier_equals_plain_peft(
    pair: ProcessGroup, encoders: Path, kind: str, family: str, adapter: str, given: dict[str, Any]
) -> None:
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
def test_an_export_is_a_folder_of_plain_peft_and_a_merged_model(
    pair: ProcessGroup, every_task: Path, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
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
