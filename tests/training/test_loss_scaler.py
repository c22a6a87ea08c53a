"""Our loss scaler makes its policy's decisions, which take effect at the end of the step, and upstream accepts it."""

import pytest

from tests.training import loss_scaler_cases

POLICIES = ["deepspeed", "adaptive", "static"]


def test_the_trace_is_upstreams(solo):
    pairs = solo.run(loss_scaler_cases.traces, examples=300)[0]
    assert all(mine == upstream for mine, upstream in pairs)
    assert any(scale != 1.0 and scale != mine[0][0] for mine, _ in pairs for scale, _ in mine)


def test_the_minimum_is_reported_on_the_step_on_which_upstream_raises(solo):
    pairs = solo.run(loss_scaler_cases.minimum_raises, examples=300)[0]
    assert all(mine == upstream for mine, upstream in pairs)
    assert sum(mine is not None for mine, _ in pairs) > 30


@pytest.mark.parametrize("policy", POLICIES)
def test_it_survives_a_round_trip_at_any_step(solo, policy):
    pairs = solo.run(loss_scaler_cases.resumed_traces, examples=200, policy=policy)[0]
    assert all(whole == broken for whole, broken in pairs)


def test_a_change_waits_for_the_end_of_the_step_and_says_why(solo):
    assert solo.run(loss_scaler_cases.story)[0] == [
        (8.0, 8.0, None, False),
        (8.0, 8.0, "hysteresis", False),
        (8.0, 4.0, "overflow", False),
        (4.0, 4.0, None, True),
        (4.0, 4.0, None, False),
        (4.0, 4.0, None, False),
        (4.0, 8.0, "growth", False),
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_the_guard_discards_changes_nothing(solo, policy):
    rows = solo.run(loss_scaler_cases.discarded, policy=policy)[0]
    assert rows and all(before == after and change is None for before, after, change in rows)


def test_a_step_that_was_to_be_discarded_but_is_applied_is_an_error(solo):
    assert "was to be discarded" in solo.run(loss_scaler_cases.discarded_but_applied)[0]
