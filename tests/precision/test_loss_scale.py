"""The loss-scale policies against an oracle that recomputes every step from the whole history, and their properties."""

import json
import math
from collections.abc import Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from config.schema import LossScaleSection
from precision.loss_scale import AdaptivePolicy, DeepSpeedPolicy, StaticPolicy, make_policy

# Storms and calms: uniform random bits would hardly ever let a window pass.
PATTERNS = st.lists(st.tuples(st.booleans(), st.integers(1, 12)), min_size=1, max_size=14).map(
    lambda runs: [overflow for overflow, length in runs for _ in range(length)]
)


@st.composite
def adaptive_sections(draw: st.DrawFn) -> LossScaleSection:
    low = draw(st.integers(0, 4))
    first = low + draw(st.integers(0, 20))
    high = first + draw(st.integers(0, 10))
    within = draw(st.integers(1, 30))
    limits = {"initial": 2.0**first, "minimum": 2.0**low, "maximum": 2.0**high}
    growth = {"window": draw(st.integers(1, 8)), "factor": 2.0 ** draw(st.integers(1, 4))}
    bursts = {"escalate_after": draw(st.integers(1, min(within, 6))), "escalate_within": within}
    return LossScaleSection(policy="adaptive", hysteresis=draw(st.integers(1, 3)), **limits, **growth, **bursts)


def sections() -> st.SearchStrategy[LossScaleSection]:
    def with_policy(section: LossScaleSection, policy: Any) -> LossScaleSection:
        kept = ("initial", "minimum", "maximum", "window", "hysteresis")
        return LossScaleSection(policy=policy, **{key: getattr(section, key) for key in kept})

    other = st.builds(with_policy, adaptive_sections(), st.sampled_from(["deepspeed", "static"]))
    return st.one_of(adaptive_sections(), other)


def oracle(section: LossScaleSection, pattern: list[bool]) -> list[tuple[int, int, int]]:
    """(log2 of the scale, log2 of the backoff in force, clean steps a growth takes) after each step.

    Says the rules in integers and positions: which steps overflowed, escalated or completed a window. Nothing ages and
    nothing is counted up, unlike in the policy.
    """
    log2 = int(math.log2(section.initial_scale))
    step_up = int(math.log2(section.factor))
    overflows: list[int] = []
    escalations: list[int] = []
    windows: list[int] = [-1]
    tolerated: list[int] = []
    rows = []
    for now, overflow in enumerate(pattern):
        if overflow:
            overflows.append(now)
            storm_starts = max([now - section.escalate_within, *escalations])
            burst = sum(step > storm_starts for step in overflows) >= section.escalate_after
            if burst:
                escalations.append(now)
            spared = sum(step > windows[-1] for step in tolerated) < section.tolerated_overflows - 1
            if spared and not burst:
                tolerated.append(now)
            else:
                level = min(sum(step > windows[-1] for step in escalations), 2)
                log2 -= max(step_up, min(step_up * [1, 2, 4][level], 8))
                log2 = max(log2, int(math.log2(section.minimum)))
        else:
            level = min(sum(step > windows[-1] for step in escalations), 2)
            calm_since = max([windows[-1], *overflows])
            if now - calm_since == section.window * [1, 2, 4][level]:
                windows.append(now)
                log2 = min(log2 + step_up, int(math.log2(section.largest_scale)))
        level = min(sum(step > windows[-1] for step in escalations), 2)
        rows.append((log2, max(step_up, min(step_up * [1, 2, 4][level], 8)), section.window * [1, 2, 4][level]))
    return rows


def updated(policy: Any, overflows: Iterable[bool]) -> Any:
    """The policy after these steps."""
    for overflow in overflows:
        policy.update(overflow)
    return policy


@settings(max_examples=400, deadline=None)
@given(section=adaptive_sections(), pattern=PATTERNS)
def test_adaptive_follows_the_oracle(section: LossScaleSection, pattern: list[bool]) -> None:
    policy = AdaptivePolicy(section)
    trace = []
    for overflow in pattern:
        policy.update(overflow)
        trace.append((math.log2(policy.scale), math.log2(policy.backoff), policy.window))
    assert trace == oracle(section, pattern)


@settings(max_examples=200, deadline=None)
@given(section=sections(), pattern=PATTERNS)
def test_the_scale_is_a_power_of_two_within_its_limits_and_moves_the_right_way(section, pattern) -> None:
    policy, in_a_row = make_policy(section), 0
    for overflow in pattern:
        before, tolerance = policy.scale, policy.hysteresis
        policy.update(overflow)
        in_a_row = in_a_row + 1 if overflow else 0
        assert policy.consecutive_overflows == in_a_row
        assert section.minimum <= policy.scale <= section.largest_scale
        assert math.frexp(policy.scale)[0] == 0.5
        assert policy.scale <= before if overflow else policy.scale >= before
        expected = "overflow" if policy.scale < before else "growth" if policy.scale > before else None
        if expected is None and policy.hysteresis != tolerance:
            expected = "hysteresis"
        assert policy.reason == expected


@settings(max_examples=200, deadline=None)
@given(section=sections(), pattern=PATTERNS, data=st.data())
def test_the_state_survives_json_at_any_step(section, pattern, data) -> None:
    cut = data.draw(st.integers(0, len(pattern)))
    unbroken, broken = make_policy(section), make_policy(section)
    for index, overflow in enumerate([*pattern, True, False]):
        if index == cut:
            state = json.loads(json.dumps(broken.state_dict()))
            broken = make_policy(section)
            broken.load_state_dict(state)
        for policy in (unbroken, broken):
            policy.update(overflow)
        assert facts(broken) == facts(unbroken)


def facts(policy: Any) -> tuple:
    return policy.state_dict(), policy.reason


@settings(max_examples=100, deadline=None)
@given(pattern=PATTERNS, maximum=st.integers(4, 8))
def test_a_maximum_stops_the_growth_of_the_deepspeed_policy_and_nothing_else(pattern: list[bool], maximum: int) -> None:
    """Each climb is cut off at the maximum; the counters run as they would without one."""
    keys = {"initial": 16.0, "window": 2, "hysteresis": 2}
    free = DeepSpeedPolicy(LossScaleSection(**keys))
    capped = DeepSpeedPolicy(LossScaleSection(**keys, maximum=2.0**maximum))
    reached = False
    for overflow in pattern:
        free.update(overflow)
        capped.update(overflow)
        reached = reached or free.scale > 2.0**maximum
        assert capped.hysteresis == free.hysteresis
        assert capped.scale == free.scale if not reached else capped.scale <= min(free.scale, 2.0**maximum)


def test_the_deepspeed_policy_has_no_maximum_by_itself() -> None:
    assert updated(DeepSpeedPolicy(LossScaleSection(window=1)), [False] * 40).scale == 2.0 ** (16 + 39)


def test_a_static_scale_never_moves_and_counts_its_overflows() -> None:
    policy = StaticPolicy(LossScaleSection(policy="static", initial=1000.0))
    seen = []
    for overflow in (True, True, False, True):
        policy.update(overflow)
        seen.append((policy.scale, policy.consecutive_overflows, policy.reason))
    assert seen == [(1000.0, n, None) for n in (1, 2, 0, 1)]


def test_the_state_of_another_policy_brings_its_scale_and_nothing_else() -> None:
    old = updated(DeepSpeedPolicy(LossScaleSection(initial=2.0**30, hysteresis=1)), [True] * 3)
    adaptive = make_policy(LossScaleSection(policy="adaptive"))
    adaptive.load_state_dict(old.state_dict())
    assert (adaptive.scale, adaptive.consecutive_overflows) == (2.0**24, 3)
    static = make_policy(LossScaleSection(policy="static", initial=8.0))
    static.load_state_dict(old.state_dict())
    assert static.scale == 8.0
