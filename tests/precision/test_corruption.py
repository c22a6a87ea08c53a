"""The rank blamed for a flipped bit, and the verdict of a repeated step."""

import pytest

from precision.corruption import different_bits, judge_reexecution, majority, odd_ranks


def test_the_bits_of_two_values_that_differ() -> None:
    assert different_bits(0b1010, 0b0011, 16) == (0, 3)
    assert different_bits(-1, -1 << 15, 16) == tuple(range(15)), "signed and unsigned readings are the same bits"
    assert different_bits(-(1 << 31), 0, 32) == (31,)
    assert different_bits(2**64 - 1, -1, 64) == ()


def test_the_value_of_most_ranks_is_right_and_nobody_knows_it_of_two() -> None:
    assert majority([4, 4, 9]) == 4 and majority([4, 9]) is None and majority([1, 1, 2, 2]) is None
    assert odd_ranks([4, 9, 4], 4) == (1,)
    assert odd_ranks([4, 9], None) == (0, 1)


STEPS = {
    "the same again": ({}, ("none", ())),
    "suspicious, the same again": ({"suspicious": True, "healthy": False}, ("numeric", ())),
    "another one, and healthy": ({"changed": [1, 1, 0], "named": [0, 1, 0]}, ("transient", (1,))),
    "only after the reduction": ({"changed": [0, 0, 1], "signed": True}, ("transient", (2,))),
    "only after the reduction, gradients not signed": ({"changed": [0, 0, 1]}, ("transient", ())),
    "everybody's": ({"changed": [1, 1, 1], "named": [1, 1, 1]}, ("transient", ())),
    "another one, never healthy": ({"changed": [0, 1, 0], "named": [0, 1, 0], "healthy": False}, ("persistent", (1,))),
    "rank 1 answers its own inputs and those of rank 2": ({"disagreed": [0, 1, 1]}, ("persistent", (1,))),
    "one batch alone": ({"disagreed": [0, 1, 0]}, ("persistent", (0, 1))),
    "one batch alone, and rank 0 was not finite": (
        {"disagreed": [0, 1, 0], "finite": [(True, True), (True, False), (True, True)]},
        ("persistent", (0,)),
    ),
    "of two ranks each may be it": ({"changed": [0, 0], "named": [0, 0], "disagreed": [1, 1]}, ("persistent", (0, 1))),
    "one rank, never healthy": (
        {"changed": [1], "named": [1], "disagreed": None, "healthy": False},
        ("persistent", (0,)),
    ),
    "one rank, healthy now": ({"changed": [1], "named": [1], "disagreed": None}, ("transient", (0,))),
}


@pytest.mark.parametrize("case", STEPS)
def test_what_a_step_says_that_was_run_again(case: str) -> None:
    told, (kind, ranks) = STEPS[case]
    usual = {"suspicious": False, "changed": [0] * 3, "healthy": True, "disagreed": [0] * 3, "named": [0] * 3}
    found = judge_reexecution(**(usual | told))
    assert (found.kind, found.ranks) == (kind, ranks), found.why
