"""Masked language modelling equals plain torch on the same masked sequences: loss, norm and weights."""

from pathlib import Path

import pytest
import torch

from data.batches.loader import IGNORED_LABEL
from tests.support.jobs.process_group import ProcessGroup
from tests.support.models.plain_steps import require_equal
from tests.support.rows.labelled import tokenizer
from tests.training.tasks import mlm_cases as cases


@pytest.mark.one_in(5)
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("loss", ("full", "chunked"))
@pytest.mark.parametrize("family", ("bert", "deberta-v2", "modernbert"))
def test_one_rank_equals_plain_torch(solo: ProcessGroup, encoders: Path, family: str, loss: str, stage: int) -> None:
    overrides = (f"model.name_or_path={encoders}/{family}", f"model.loss={loss}")
    [found] = solo.run(cases.steps, folder=encoders, stage=stage, overrides=overrides)
    assert found["chunked"] == (loss == "chunked")
    require_equal(found, cases.oracle(encoders, family, found))


def test_two_ranks_equal_plain_torch_and_one(pair: ProcessGroup, solo: ProcessGroup, encoders: Path) -> None:
    for stage in (0, 1, 2, 3):
        found, other = pair.run(cases.steps, folder=encoders, stage=stage, overrides=("model.loss=full",))
        if stage == 0:
            exact = cases.oracle(encoders, "bert", found)
        require_equal(found, exact)
        assert [step["loss"] for step in found["steps"]] == [step["loss"] for step in other["steps"]]
    [alone] = solo.run(cases.steps, folder=encoders, stage=2, overrides=("model.loss=full", "batch.micro_size=4"))
    for mine, theirs in zip(alone["steps"], found["steps"], strict=True):  # which rank sees it changes no mask
        rows = [sorted(zip(step["seen"].tolist(), step["labels"].tolist(), strict=True)) for step in (mine, theirs)]
        assert rows[0] == rows[1]


def test_sequences_begin_and_end_as_the_tokenizer_has_it(solo: ProcessGroup, encoders: Path) -> None:
    [found] = solo.run(cases.steps, folder=encoders, stage=0)
    made, step = tokenizer(), found["steps"][0]
    whole = torch.where(step["labels"] == IGNORED_LABEL, step["seen"], step["labels"])
    assert (whole[:, 0] == made.cls_token_id).all()
    assert (whole[:, -1] == made.sep_token_id).all()
    assert not torch.isin(step["labels"], torch.tensor(made.all_special_ids)).any()
    seen_again = {tuple(row) for later in found["steps"][1:] for row in later["seen"].tolist()}
    assert not seen_again & {tuple(row) for row in step["seen"].tolist()}


def test_validation_hides_the_same_each_time_whatever_the_layout(
    pair: ProcessGroup, solo: ProcessGroup, encoders: Path
) -> None:
    given = ("evaluate={every_steps: 1, batches: 100}",)
    one = pair.run(cases.validation, folder=encoders, overrides=given)[0]
    [two] = solo.run(
        cases.validation, folder=encoders, overrides=(*given, "batch.global_size=12", "batch.micro_size=4")
    )
    assert one["same"]
    assert two["same"]
    assert one["losses"][0] == one["losses"][1]
    assert two["losses"][0].loss == pytest.approx(one["losses"][0].loss, rel=1e-6)
    assert one["losses"][0].perplexity is not None
    rows = [{tuple(row) for row in found["rows"].tolist() if any(row[1:-1])} for found in (one, two)]
    assert rows[0] == rows[1]
    assert len(rows[0]) > 12
