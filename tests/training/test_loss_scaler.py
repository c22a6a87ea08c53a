"""Our loss scaler makes upstream's decisions, which take effect at the end of the step."""

from __future__ import annotations

from tests.training import loss_scaler_cases


def test_the_trace_is_upstreams(solo):
    pairs = solo.run(loss_scaler_cases.traces, examples=300)[0]
    assert all(mine == upstream for mine, upstream in pairs)
    assert any(scale != 1.0 and scale != mine[0][0] for mine, _ in pairs for scale, _ in mine)


def test_its_state_survives_a_round_trip_at_any_step(solo):
    assert all(whole == broken for whole, broken in solo.run(loss_scaler_cases.resumed_traces, examples=300)[0])


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
