"""Classification and masked language modelling equal plain torch on the same rows: loss, norm, weights, metrics."""

from pathlib import Path
from typing import Any

import pytest
import torch

from data.batches.loader import IGNORED_LABEL
from tests.support.jobs.process_group import ProcessGroup
from tests.support.models import plain_steps
from tests.support.rows.labelled import tokenizer
from tests.support.runs.metrics import expected_metrics
from tests.training.tasks import classify_cases as cases
from tests.training.tasks import mlm_cases


def require_equal(found: dict[str, Any], exact: dict[str, Any], kind: str) -> None:
    plain_steps.require_equal(found, exact)
    for mine, theirs in zip(found["steps"], exact["steps"], strict=True):
        metrics = expected_metrics(kind, theirs["predicted"], theirs["there"])
        # predictions of an untrained model are almost one number, so rounding shows in their correlation
        assert mine["metrics"] == pytest.approx(metrics, rel=1e-5, abs=1e-3 if kind == "regression" else 1e-9)


PAIR = "data.text_pair_field=other"
CELLS = [
    *(("sequence", "bert", (PAIR,)), ("sequence", "deberta-v2", (PAIR,)), ("sequence", "modernbert", ())),
    *(("token", "bert", ()), ("token", "deberta-v2", ()), ("token", "modernbert", ())),
    *(("regression", "bert", (PAIR,)), ("regression", "deberta-v2", ()), ("regression", "modernbert", ())),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("kind", "family", "further"), CELLS)
def test_one_and_two_ranks_equal_plain_torch(pair, solo, encoders, kind, family, further) -> None:
    options = {"kind": kind, "overrides": (f"model.name_or_path={encoders}/{family}", *further)}
    for group, stages in ((pair, (0, 1, 2, 3)), (solo, (2,))):
        for stage in stages:
            found, *others = group.run(cases.steps, folder=encoders, stage=stage, **options)
            if (group, stage) == (pair, 0):
                exact = cases.oracle(encoders, found, kind=kind, model=family, pair=bool(further))
            require_equal(found, exact, kind)
            assert all(other["steps"] == found["steps"] for other in others)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("loss", ("full", "chunked"))
@pytest.mark.parametrize("family", ("bert", "deberta-v2", "modernbert"))
def test_one_rank_equals_plain_torch(solo: ProcessGroup, encoders: Path, family: str, loss: str, stage: int) -> None:
    overrides = (f"model.name_or_path={encoders}/{family}", f"model.loss={loss}")
    [found] = solo.run(mlm_cases.steps, folder=encoders, stage=stage, overrides=overrides)
    assert found["chunked"] == (loss == "chunked")
    plain_steps.require_equal(found, mlm_cases.oracle(encoders, family, found))


def test_two_ranks_equal_plain_torch_and_one(pair: ProcessGroup, solo: ProcessGroup, encoders: Path) -> None:
    for stage in (0, 1, 2, 3):
        found, other = pair.run(mlm_cases.steps, folder=encoders, stage=stage, overrides=("model.loss=full",))
        if stage == 0:
            exact = mlm_cases.oracle(encoders, "bert", found)
        plain_steps.require_equal(found, exact)
        assert [step["loss"] for step in found["steps"]] == [step["loss"] for step in other["steps"]]
    [alone] = solo.run(mlm_cases.steps, folder=encoders, stage=2, overrides=("model.loss=full", "batch.micro_size=4"))
    for mine, theirs in zip(alone["steps"], found["steps"], strict=True):  # which rank sees it changes no mask
        rows = [sorted(zip(step["seen"].tolist(), step["labels"].tolist(), strict=True)) for step in (mine, theirs)]
        assert rows[0] == rows[1]


def test_sequences_begin_and_end_as_the_tokenizer_has_it(solo: ProcessGroup, encoders: Path) -> None:
    [found] = solo.run(mlm_cases.steps, folder=encoders, stage=0)
    made, step = tokenizer(), found["steps"][0]
    whole = torch.where(step["labels"] == IGNORED_LABEL, step["seen"], step["labels"])
    assert (whole[:, 0] == made.cls_token_id).all()
    assert (whole[:, -1] == made.sep_token_id).all()
    assert not torch.isin(step["labels"], torch.tensor(made.all_special_ids)).any()
    seen_again = {tuple(row) for later in found["steps"][1:] for row in later["seen"].tolist()}
    assert not seen_again & {tuple(row) for row in step["seen"].tolist()}


def test_validation_hides_the_same_each_time_whatever_the_layout(pair, solo, encoders) -> None:
    given = ("evaluate={every_steps: 1, batches: 100}",)
    one = pair.run(mlm_cases.validation, folder=encoders, overrides=given)[0]
    [two] = solo.run(
        mlm_cases.validation, folder=encoders, overrides=(*given, "batch.global_size=12", "batch.micro_size=4")
    )
    assert one["same"]
    assert two["same"]
    assert one["losses"][0] == one["losses"][1]
    assert two["losses"][0].loss == pytest.approx(one["losses"][0].loss, rel=1e-6)
    assert one["losses"][0].perplexity is not None
    rows = [{tuple(row) for row in found["rows"].tolist() if any(row[1:-1])} for found in (one, two)]
    assert rows[0] == rows[1]
    assert len(rows[0]) > 12
