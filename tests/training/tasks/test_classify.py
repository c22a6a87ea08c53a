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
CELLS = [
    *(("sequence", "bert", (PAIR,)), ("sequence", "deberta-v2", (PAIR,)), ("sequence", "modernbert", ())),
    *(("token", "bert", ()), ("token", "deberta-v2", ()), ("token", "modernbert", ())),
    *(("regression", "bert", (PAIR,)), ("regression", "deberta-v2", ()), ("regression", "modernbert", ())),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("kind", "family", "further"), CELLS)
def test_one_and_two_ranks_equal_plain_torch(
    pair: ProcessGroup, solo: ProcessGroup, encoders: Path, kind: str, family: str, further: tuple[str, ...]
) -> None:
    options = {"kind": kind, "overrides": (f"model.name_or_path={encoders}/{family}", *further)}
    for group, stages in ((pair, (0, 1, 2, 3)), (solo, (2,))):
        for stage in stages:
            found, *others = group.run(cases.steps, folder=encoders, stage=stage, **options)
            if (group, stage) == (pair, 0):
                exact = cases.oracle(encoders, found, kind=kind, model=family, pair=bool(further))
            require_equal(found, exact, kind)
            assert all(other["steps"] == found["steps"] for other in others)
