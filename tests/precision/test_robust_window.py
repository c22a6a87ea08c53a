"""The robust score against numpy, on random data and under contamination."""

import json
import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precision.robust_window import RobustWindow

NUMBER = st.floats(-1e6, 1e6)


def oracle(values: list[float], value: float, floor: float) -> float:
    array = numpy.array(values, dtype=numpy.float64)
    center = numpy.median(array)
    spread = numpy.median(numpy.abs(array - center)) * 1.482602218505602
    return float((value - center) / max(spread, floor))


def filled(values: list[float], size: int, floor: float = 0.01) -> RobustWindow:
    window = RobustWindow(size, floor=floor)
    for value in values:
        window.push(value)
    return window


@settings(max_examples=200, deadline=None)
@given(values=st.lists(NUMBER, min_size=1, max_size=60), value=NUMBER, size=st.integers(2, 20))
def test_the_score_is_numpy_s_over_the_newest_values(values: list[float], value: float, size: int) -> None:
    window, kept = filled(values, size), values[-size:]
    assert len(window) == len(kept)
    if 2 * len(kept) < size:
        assert window.score(value) is None and window.median is None
        return
    assert window.median == numpy.median(kept)
    assert window.score(value) == pytest.approx(oracle(kept, value, 0.01), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("spike", [1e3, 1e30])
def test_forty_percent_of_spikes_do_not_hide_the_next_one(spike: float) -> None:
    healthy = numpy.random.default_rng(1).normal(3.0, 0.1, 60).tolist()
    spoiled = healthy + [spike] * 40
    assert filled(spoiled, 100).score(6.0) > 6
    assert abs((6.0 - numpy.mean(spoiled)) / numpy.std(spoiled)) < 1.5  # what mean and std say


def test_values_that_repeat_do_not_make_every_change_a_spike() -> None:
    window = filled([2.0] * 10, 10, floor=0.01)
    assert window.score(2.0) == 0
    assert window.score(2.05) == pytest.approx(5.0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not a value"):
        RobustWindow(4).push(value)


@pytest.mark.parametrize(("size", "floor"), [(1, 0.01), (4, 0.0), (4, math.nan)])
def test_a_window_that_cannot_score_is_refused(size: int, floor: float) -> None:
    with pytest.raises(ValueError, match="cannot score"):
        RobustWindow(size, floor=floor)


@settings(max_examples=50, deadline=None)
@given(values=st.lists(NUMBER, max_size=40), more=st.lists(NUMBER, max_size=20))
def test_a_window_goes_on_from_its_state_as_if_unbroken(values: list[float], more: list[float]) -> None:
    unbroken, resumed = filled(values, 12), RobustWindow(12)
    resumed.load_state_dict(json.loads(json.dumps(unbroken.state_dict())))
    for value in more:
        unbroken.push(value)
        resumed.push(value)
    assert resumed.state_dict() == unbroken.state_dict()
    assert resumed.score(1.0) == unbroken.score(1.0)


def test_a_smaller_window_keeps_the_newest_values_of_a_larger_one() -> None:
    small = RobustWindow(3)
    small.load_state_dict(filled([1.0, 2.0, 3.0, 4.0, 5.0], 5).state_dict())
    assert small.state_dict() == {"values": [3.0, 4.0, 5.0]}
