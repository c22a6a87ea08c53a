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
    ("changed", "allowed", "same"),
    [
        ({}, 0.0, True),
        ({"loss": 2.5000001}, 0.0, False),
        ({"loss": 2.5000001, "grad_norm": 1.26}, 0.01, True),
        ({"grad_norm": 1.3}, 0.01, False),
        ({"loss": float("nan")}, 0.01, False),
        ({"sample_ids_sha256": "cd"}, 0.01, False),
        ({"lr": 0.0010001}, 0.01, False),
    ],
)
def test_sums_alone_may_differ_where_they_have_no_order(changed: dict[str, Any], allowed: float, same: bool) -> None:
    said: list[str] = []
    assert repeat._compare(STEP | changed, STEP, said.append, allowed=allowed) is same
    assert ("two repeats" in said[0]) is (same and bool(changed))
    assert ("to the bit as recorded" in said[0]) is not bool(changed)


def test_two_repeats_are_as_far_apart_as_their_sums() -> None:
    assert repeat._distance(STEP, STEP) == 0.0
    assert repeat._distance(STEP, STEP | {"loss": 2.4, "grad_norm": 1.0, "lr": 7.0}) == pytest.approx(0.2)
    assert repeat._distance(STEP, STEP | {"loss": 2.0, "grad_norm": float("nan")}) == pytest.approx(0.2)
