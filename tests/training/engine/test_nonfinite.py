"""A gradient with a NaN or inf on any rank is never applied, whatever ranks share and wherever masters are."""

from pathlib import Path

import pytest

from tests.support.jobs.process_group import ProcessGroup
from tests.support.marks import slow
from tests.training.engine import nonfinite_cases

SPLIT = ("precision.masters=split",)


@pytest.mark.parametrize(
    ("layout", "stage", "compute", "overrides"),
    [
        ("tensor", 2, "fp32", ()),
        ("expert", 3, "bf16", ()),
        *(slow("tensor", *cell, ()) for cell in ((0, "fp32"), (1, "bf16"), (1, "fp16"), (3, "bf16"), (3, "fp16"))),
        *(slow("expert", *cell, ()) for cell in ((1, "bf16"), (2, "fp32"), (2, "fp16"))),
        *(slow("sequence", *cell, ()) for cell in ((1, "bf16"), (2, "fp32"), (3, "bf16"))),
        *(slow("hpz", 3, compute, ()) for compute in ("fp32", "bf16", "fp16")),
        *(slow("offload", *cell, ()) for cell in ((1, "fp32"), (2, "bf16"), (3, "bf16"), (3, "fp16"))),
        *(slow("data", stage, "bf16", SPLIT) for stage in (1, 2, 3)),
        *(slow("data", *cell, ()) for cell in ((0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "fp32"))),
    ],
)
def test_it_is_never_applied(
    pair: ProcessGroup, tmp_path: Path, layout: str, stage: int, compute: str, overrides: tuple[str, ...]
) -> None:
    given = {"layout": layout, "stage": stage, "compute": compute, "overrides": overrides, "folder": str(tmp_path)}
    for found in pair.run(nonfinite_cases.spoiled, **given):
        assert found["wrong"] == []
        assert found["sound"], "the step after them"
        assert found["cases"] >= 3


@pytest.mark.parametrize(("layout", "stage", "compute"), [slow("tensor", 2, "bf16"), slow("tensor", 3, "fp32")])
def test_nor_by_four_ranks_that_share_by_two(
    four: ProcessGroup, tmp_path: Path, layout: str, stage: int, compute: str
) -> None:
    for found in four.run(nonfinite_cases.spoiled, layout=layout, stage=stage, compute=compute, folder=str(tmp_path)):
        assert found["wrong"] == []
        assert found["sound"]
