"""The cut of a global batch, and what the error proposes when it does not come out even."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.batch import plan_batch
from config.errors import UserError
from tests.support.refusals import refused

SIZES = st.integers(1, 200)


@given(SIZES, SIZES, SIZES)
def test_a_plan_multiplies_out_or_proposes_sizes_that_do(global_size: int, micro_size: int, world_size: int) -> None:
    try:
        plan = plan_batch(global_size, micro_size, world_size, where="demo.yaml")
    except UserError as error:
        assert global_size % (micro_size * world_size)
        check_proposals(str(error), global_size, micro_size, world_size)
    else:
        assert plan.micro_size * plan.accumulation * plan.world_size == plan.global_size == global_size
        assert plan.accumulation >= 1


def check_proposals(message: str, global_size: int, micro_size: int, world_size: int) -> None:
    """Every size that the message names works when it is put in."""
    for size in numbers(message, r"batch.micro_size to one of ([\d, ]+)"):
        plan_batch(global_size, size, world_size, where="")
    for size in numbers(message, r"run on one of ([\d, ]+)"):
        plan_batch(global_size, micro_size, size, where="")
    proposed = numbers(message, r"batch.global_size to ([\d or]+)")
    assert proposed
    for size in proposed:
        plan_batch(size, micro_size, world_size, where="")


def numbers(message: str, pattern: str) -> list[int]:
    found = re.search(pattern, message)
    return [int(item) for item in re.findall(r"\d+", found[1])] if found else []


def test_the_message_is_one_line_with_file_keys_and_values() -> None:
    assert refused(plan_batch, 12, 4, 2, where=str(Path("demo.yaml"))) == (
        "demo.yaml: batch.global_size = 12 cannot be cut into micro-batches of batch.micro_size = 4 on 2 processes; "
        "set batch.micro_size to one of 1, 2, 3, 6, or run on one of 1, 3 processes, "
        "or set batch.global_size to 8 or 16"
    )


@given(SIZES, SIZES, SIZES, st.integers(1, 8))
def test_ranks_that_share_sequences_count_as_one(global_size: int, micro_size: int, groups: int, ranks: int) -> None:
    try:
        plan = plan_batch(global_size, micro_size, groups * ranks, where="", sequence=ranks)
    except UserError as error:
        assert global_size % (micro_size * groups)
        for size in numbers(str(error), r"run on one of ([\d, ]+)"):
            plan_batch(global_size, micro_size, size, where="", sequence=ranks)
    else:
        alone = plan_batch(global_size, micro_size, groups, where="")
        assert (plan.accumulation, plan.data_ranks) == (alone.accumulation, groups)


@pytest.mark.parametrize(("key", "data_ranks"), [("expert", 8), ("tensor", 4), ("sequence", 4)])
def test_ranks_that_share_experts_alone_have_sequences_of_their_own(key: str, data_ranks: int) -> None:
    plan = plan_batch(8, 1, 8, where="", **{key: 2})
    assert (plan.data_ranks, plan.accumulation) == (data_ranks, 8 // data_ranks)
    fix = "set it to one of 1, 2, 4, 8, or run on a multiple of it"
    said = refused(plan_batch, 8, 1, 8, where="demo.yaml", **{key: 3})
    assert said == f"demo.yaml: parallel.{key} = 3 does not divide 8 processes; {fix}"


def test_the_message_says_how_many_ranks_share() -> None:
    said = refused(plan_batch, 4, 3, 8, where="", tensor=2)
    assert "on 8 processes, 2 to a tensor (parallel.tensor); set batch.micro_size to one of 1" in said
