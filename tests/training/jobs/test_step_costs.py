"""A guarded step costs what it has to: counted in device waits, collectives, lines of Python and system calls.

Times would depend on the machine; counts do not. `python -m lab.benchmark` has the times.
"""

from collections import Counter

import pytest

from tests.support.jobs.process_group import ProcessGroup
from tests.training.jobs import step_cost_cases

CORRUPTION = ("guard.replica_checks=1", "guard.update_checks=100000", "guard.reexecute=every 1000")


@pytest.mark.parametrize(
    ("stage", "compute", "checks"), [(1, "bf16", ()), (2, "fp16", ()), (3, "bf16", ()), (2, "bf16", CORRUPTION)]
)
def test_one_wait_for_the_device_and_one_collective_more_than_a_bare_step(pair, stage, compute, checks) -> None:
    """Checks for silent corruption change neither count."""
    for counted in pair.run(step_cost_cases.waits_and_collectives, stage=stage, compute=compute, further=checks):
        assert counted["ours"] == ["health.py:__init__"]
        bare, guarded = map(Counter, counted["upstream"])
        assert not guarded - bare, "upstream waits no more often than in a bare step"
        assert not any("packed" in place for place in guarded), "rows hold one document each"
        # ZeRO-3 also waits for a stream of its own after each backward pass (stage3.py), which a CPU does not have
        assert set(counted["drained"]) <= ({"backward_epilogue"} if stage == 3 else set())
        more = Counter(counted["guarded"])
        more.subtract(counted["bare"])
        # the bare step has the sum of label tokens too: these are masked, and the sum belongs to the loss
        assert {name: count for name, count in more.items() if count} == {"all_gather_into_tensor": 1}


def test_labels_are_not_counted_together_where_every_rank_knows_how_many_there_are(pair: ProcessGroup) -> None:
    for known, asked in pair.run(step_cost_cases.known_and_asked_label_tokens):
        assert known["loss"] == asked["loss"] and known["norm"] == asked["norm"]
        assert asked["all_reduce"] == known["all_reduce"] + 1


def test_bookkeeping_does_not_grow_with_the_model_or_the_run(pair: ProcessGroup) -> None:
    """Beyond the window of the guard, which is full after 16 steps here."""
    runs = [(1, 20), (4, 20), (1, 40)]
    small, large, late = (
        pair.run(step_cost_cases.lines_of_a_step, layers=layers, stage=2, before=before) for layers, before in runs
    )
    assert small == large == late
    assert min(small) > 50, "lines were counted"


def test_a_step_writes_one_line_and_forces_nothing_to_the_disk(pair: ProcessGroup) -> None:
    assert pair.run(step_cost_cases.files_of_a_step) == [(20, 0), (0, 0)]
