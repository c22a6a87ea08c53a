"""Replay accepts as the recorded step the same bits or, where sums have no fixed order, nearly the same sums."""

from typing import Any

import pytest

from tools.replay import repeat

STEP: dict[str, Any] = {
    "step": 3,
    "loss": 2.5,
    "grad_norm": 1.25,
    "loss_scale": 1.0,
    "lr": 0.001,
    "applied": True,
    "sample_ids_sha256": "ab",
}


@pytest.mark.parametrize(
    ("changed", "exact", "same"),
    [
        ({}, True, True),
        ({"loss": 2.5000001}, True, False),
        ({"loss": 2.5000001, "grad_norm": 1.26}, False, True),
        ({"grad_norm": 1.3}, False, False),
        ({"loss": float("nan")}, False, False),
        ({"sample_ids_sha256": "cd"}, False, False),
        ({"lr": 0.0010001}, False, False),
    ],
)
def test_sums_alone_may_differ_where_they_have_no_order(changed: dict[str, Any], exact: bool, same: bool) -> None:
    said: list[str] = []
    assert repeat._compare(STEP | changed, STEP, said.append, exact=exact) is same
    assert ("run.deterministic" in said[0]) is (same and bool(changed))
    assert ("to the bit as recorded" in said[0]) is not bool(changed)
