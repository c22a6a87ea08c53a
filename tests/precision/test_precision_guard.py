"""The guard's judgement, without a process group."""

from __future__ import annotations

import math

import pytest

from config.schema import GuardSection
from precision.guard import Verdict, judge

SECTION = GuardSection(max_consecutive_skips=3)


@pytest.mark.parametrize(("skips", "expected"), [(0, Verdict.STEP), (2, Verdict.STEP), (3, Verdict.ABORT)])
def test_skips_in_a_row_end_the_run_at_the_limit(skips, expected):
    judgement = judge(SECTION, consecutive_skips=skips, scale_at_minimum=False, loss=math.nan)
    assert judgement.verdict is expected
    assert ("guard.max_consecutive_skips" in judgement.reason and "nan" in judgement.reason) is (skips == 3)


def test_an_overflow_at_the_smallest_scale_ends_the_run_with_advice():
    judgement = judge(SECTION, consecutive_skips=1, scale_at_minimum=True, loss=2.5)
    assert judgement.verdict is Verdict.ABORT
    assert "precision.loss_scale.minimum" in judgement.reason and "bf16" in judgement.reason
