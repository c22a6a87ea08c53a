"""The goals of the GPU check: what is read of an item's figures, and when a goal counts as reached."""

from typing import Any

import pytest

from lab.gpu_check.goals import GOALS, HOLDS, MISSED, goals_table
from lab.gpu_check.items import PARTS


def done(figures: dict[str, Any]) -> dict[str, Any]:
    return {"status": "done", "error": "", "figures": figures}


def row(rate: float, *, same: bool = True, mfu: float = 0.4) -> dict[str, Any]:
    return {"tokens/s": rate, "MFU": mfu, "memory GiB": 10.0, "trains the same": same}


def outcomes(part: int, results: dict[str, Any], *, tiny: bool = False) -> dict[str, tuple[str, str]]:
    """The measured value and its outcome, by goal."""
    lines = str(goals_table(part, results, tiny=tiny)).splitlines()[2:]
    cells = [line.strip("|").split(" | ") for line in lines]
    return {each[0].strip(): (each[2].strip(), each[3].strip()) for each in cells}


def test_every_goal_is_measured_by_items_of_its_part() -> None:
    for goal in GOALS:
        assert set(goal.items) <= {item.name for item in PARTS[goal.part].items}, goal.what
    assert {goal.part for goal in GOALS} == set(PARTS)


def test_a_goal_holds_where_every_measurement_of_it_does() -> None:
    first = {"mantissa": row(130.0, mfu=0.51), "bare": row(130.0), "mantissa-torch": row(100.0), "trainer": row(100.0)}
    again = first | {"mantissa": row(120.0, mfu=0.52)}
    found = outcomes(3, {"peers-2048": done(first), "peers-2048-again": done(again)})
    assert found["MFU, of the data sheet's peak"] == ("0.51; 0.52", "holds")
    assert found["mantissa over the Trainer with DeepSpeed"] == ("1.3; 1.2", "**not sure**: it held in one measurement")
    assert found["with torch's kernels over bare DeepSpeed"] == ("0.7692; 0.7692", "**missed**")
    assert found["mantissa over torchtitan"] == ("losses differ, or it took no part", "not measured")
    slower = {"mantissa": row(90.0), "torchtitan": row(100.0), "torchtitan-compile": row(60.0)}
    found = outcomes(3, {"peers-4096": done(slower)})
    assert found["mantissa over torchtitan with 4,096 tokens"] == ("0.9", "**missed**")
    assert found["mantissa over torchtitan, compiled, 4,096 tokens"] == ("1.5", "holds")
    assert found["mantissa over torchtitan"] == ("peers-2048 was not run", "not measured")


def test_contestants_whose_losses_differ_and_those_that_failed_reach_no_goal() -> None:
    figures = {"mantissa": row(130.0), "bare": row(1.0, same=False), "trainer": "failed", "mantissa-torch": row(1.0)}
    failed = {"status": "failed", "error": "trainer-1 failed: no memory", "figures": figures}
    found = outcomes(3, {"peers-2048": failed})
    assert found["mantissa over bare DeepSpeed, tokens/s"] == ("trainer-1 failed: no memory", "not measured")
    assert found["mantissa over the Trainer with DeepSpeed"][1] == "not measured"
    assert found["MFU, of the data sheet's peak"] == ("0.4", "**missed**")
    assert outcomes(3, {"peers-2048": done(figures)})["mantissa over bare DeepSpeed, tokens/s"] == (
        "losses differ, or it took no part",
        "not measured",
    )


@pytest.mark.parametrize(
    ("equal", "before", "after", "outcome"),
    [
        (True, 0.0, 0.0, HOLDS),
        (False, 1e-6, 9e-6, HOLDS),
        (False, 0.0, 1e-6, MISSED),
        (False, 1e-6, 2e-5, MISSED),
    ],
)
def test_a_resumed_run_may_differ_as_two_runs_do(equal: bool, before: float, after: float, outcome: str) -> None:
    figures = {"bit-equal": equal, "largest difference after it": after, "and before it, of two runs": before}
    found = outcomes(1, {"resume": done(figures)})["does a killed run resume as two runs agree?"]
    assert found == ("yes" if outcome == HOLDS else "no", outcome)
