"""Classification equals plain torch on the same rows, one at a time: loss, norm, weights and metrics."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.process_group import ProcessGroup
from tests.support.models import plain_steps
from tests.support.runs.metrics import expected_metrics
from tests.training.tasks import classify_cases as cases


def require_equal(found: dict[str, Any], exact: dict[str, Any], kind: str) -> None:
    plain_steps.require_equal(found, exact)
    for mine, theirs in zip(found["steps"], exact["steps"], strict=True):
        metrics = expected_metrics(kind, theirs["predicted"], theirs["there"])
        # predictions of an untrained model are almost one number, so rounding shows in their correlation
        assert mine["metrics"] == pytest.approx(metrics, rel=1e-5, abs=1e-3 if kind == "regression" else 1e-9)


PAIR = "data.text_pair_field=other"
CELLS = [("sequence", "bert", (PAIR,)), ("token", "modernbert", ()), ("regression", "deberta-v2", ())]
MORE = [
    ("sequence", "deberta-v2", (PAIR,)),
    ("sequence", "modernbert", ()),
    ("token", "bert", ()),
    ("token", "deberta-v2", ()),
    ("regression", "bert", (PAIR,)),
    ("regression", "modernbert", ()),
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize(("kind", "family", "further"), CELLS + MORE)
def test_one_rank_equals_plain_torch(
    solo: ProcessGroup, encoders: Path, kind: str, family: str, further: tuple[str, ...], stage: int
) -> None:
    overrides = (f"model.name_or_path={encoders}/{family}", *further)
    [found] = solo.run(cases.steps, folder=encoders, kind=kind, stage=stage, overrides=overrides)
    require_equal(found, cases.oracle(encoders, found, kind=kind, model=family, pair=bool(further)), kind)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "family", "further"), CELLS)
def test_two_ranks_equal_plain_torch(
    pair: ProcessGroup, encoders: Path, kind: str, family: str, further: tuple[str, ...]
) -> None:
    overrides = (f"model.name_or_path={encoders}/{family}", *further)
    for stage in (0, 1, 2, 3):
        found, other = pair.run(cases.steps, folder=encoders, kind=kind, stage=stage, overrides=overrides)
        if stage == 0:
            exact = cases.oracle(encoders, found, kind=kind, model=family, pair=bool(further))
        require_equal(found, exact, kind)
        assert found["steps"] == other["steps"]
