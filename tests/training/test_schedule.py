"""The learning rate against a definition written out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.schema import ScheduleSection
from training.schedule import learning_rate

NAMES = ["cosine", "linear", "wsd", "constant"]


@pytest.mark.parametrize("name", NAMES)
def test_shape_of_ten_steps(name):
    section = ScheduleSection(name=name, warmup_steps=2, final_ratio=0.1, decay_fraction=0.4)
    rates = [learning_rate(section, peak=2.0, applied=applied, total=10) for applied in range(10)]
    after = {
        "cosine": [0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * k / 7)) for k in range(8)],
        "linear": [0.2 + 1.8 * (1 - k / 7) for k in range(8)],
        "wsd": [2.0, 2.0, 2.0, 2.0, 1.55, 1.1, 0.65, 0.2],
        "constant": [2.0] * 8,
    }[name]
    assert rates == pytest.approx([1.0, 2.0, *after])


@given(
    name=st.sampled_from(NAMES),
    warmup=st.integers(0, 50),
    total=st.integers(1, 200),
    ratio=st.floats(0, 1),
    peak=st.floats(1e-8, 10),
    applied=st.integers(0, 400),
)
def test_stays_between_zero_and_the_peak_and_never_rises_after_warm_up(name, warmup, total, ratio, peak, applied):
    section = ScheduleSection(name=name, warmup_steps=min(warmup, total), final_ratio=ratio)
    now = learning_rate(section, peak=peak, applied=applied, total=total)
    then = learning_rate(section, peak=peak, applied=applied + 1, total=total)
    assert 0 < now <= peak * (1 + 1e-9) or ratio == 0
    if applied >= section.warmup_steps:
        assert then <= now * (1 + 1e-9)
