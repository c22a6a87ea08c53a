"""A gradient with a NaN or inf on any rank is never applied, whatever ranks share and wherever masters are."""

import pytest

from tests.support.marks import slow
from tests.training.engine import nonfinite_cases

SPLIT = ("precision.masters=split",)


@pytest.mark.parametrize(
    ("ranks", "layout", "stage", "compute", "overrides"),
    [
        ("pair", "tensor", 2, "fp32", ()),
        ("pair", "expert", 3, "bf16", ()),
        *(
            slow("pair", "tensor", *cell, ())
            for cell in ((0, "fp32"), (1, "bf16"), (1, "fp16"), (3, "bf16"), (3, "fp16"))
        ),
        *(slow("pair", "expert", *cell, ()) for cell in ((1, "bf16"), (2, "fp32"), (2, "fp16"))),
        *(slow("pair", "sequence", *cell, ()) for cell in ((1, "bf16"), (2, "fp32"), (3, "bf16"))),
        *(slow("pair", "hpz", 3, compute, ()) for compute in ("fp32", "bf16", "fp16")),
        *(slow("pair", "offload", *cell, ()) for cell in ((1, "fp32"), (2, "bf16"), (3, "bf16"), (3, "fp16"))),
        *(slow("pair", "data", stage, "bf16", SPLIT) for stage in (1, 2, 3)),
        *(slow("pair", "data", *cell, ()) for cell in ((0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "fp32"))),
        *(slow("four", "tensor", *cell, ()) for cell in ((2, "bf16"), (3, "fp32"))),
    ],
)
def test_it_is_never_applied(request, tmp_path, ranks, layout, stage, compute, overrides):
    given = {"layout": layout, "stage": stage, "compute": compute, "overrides": overrides, "folder": str(tmp_path)}
    for found in request.getfixturevalue(ranks).run(nonfinite_cases.spoiled, **given):
        assert found["wrong"] == []
        assert found["sound"], "the step after them"
        assert found["cases"] >= 3
