"""Our loss scaler makes its policy's decisions, which take effect at the end of the step, and upstream accepts it."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from config.schema import LossScaleSection
from training.checkpoint.reader import PLAIN
from training.distributed import World
from training.loss_scaler import LossScaler

POLICIES = ["deepspeed", "adaptive", "static"]


def cases(count: int, **keys: Any) -> Iterator[tuple[LossScaleSection, list[bool]]]:
    """Sections, and which of some steps overflow, drawn at random."""
    draw = random.Random(0)
    for _ in range(count):
        given = {"initial": 2.0 ** draw.randint(0, 6), "window": draw.randint(1, 5), "hysteresis": draw.randint(1, 3)}
        rate = draw.random()
        pattern = [draw.random() < rate for _ in range(draw.randint(1, 60))]
        yield LossScaleSection(minimum=1.0, escalate_within=20, **given, **keys), pattern


def take(scaler, overflow):
    """The change that a step makes."""
    scaler.update_scale(overflow)
    return scaler.apply_change()


def compare_with_upstream(world: World) -> tuple[int, int]:
    """The numbers of changes and of runs that reach the minimum; DeepSpeed's scaler asks for a rank."""
    changes = minima = 0
    for section, pattern in cases(300):
        given = (section.initial, section.window, section.minimum, section.hysteresis, False)
        ours, upstream, raising = LossScaler(section), DynamicLossScaler(*given, False), DynamicLossScaler(*given, True)
        reported = raised = False
        for overflow in pattern:
            changes += take(ours, overflow) is not None
            upstream.update_scale(overflow)
            assert (ours.cur_scale, ours.policy.hysteresis) == (upstream.cur_scale, upstream.cur_hysteresis)
            try:
                if not raised:
                    raising.update_scale(overflow)
            except Exception as error:
                raised = "already at minimum" in str(error)
            reported |= ours.policy.at_minimum
            assert reported == raised
        minima += raised
    return changes, minima


def test_the_trace_is_upstreams_and_the_minimum_is_reported_where_upstream_raises(solo):
    [(changes, minima)] = solo.run(compare_with_upstream)
    assert changes > 300 and minima > 30


@pytest.mark.parametrize("policy", POLICIES)
def test_it_survives_a_round_trip_at_any_step(policy, tmp_path):
    """As ZeRO's files carry it: pickled by DeepSpeed, read back by the reader that runs no code."""
    for section, pattern in cases(100, policy=policy):
        whole, broken, cut = (
            LossScaler(section),
            LossScaler(section),
            random.Random(len(pattern)).randrange(len(pattern)),
        )
        for step, overflow in enumerate(pattern):
            if step == cut:
                torch.save({"loss_scaler": broken}, tmp_path / "optim_states.pt")
                broken = PLAIN.read(tmp_path / "optim_states.pt")["loss_scaler"]
            assert take(whole, overflow) == take(broken, overflow)
            assert (whole.state_dict(), whole.cur_scale) == (broken.state_dict(), broken.cur_scale)
            assert whole.policy.at_minimum == broken.policy.at_minimum


def test_a_change_waits_for_the_end_of_the_step_and_says_why():
    scaler = LossScaler(LossScaleSection(initial=8.0, window=2, hysteresis=2, minimum=4.0))
    rows = []
    for overflow in (False, True, True, True, False, False, False):
        scaler.update_scale(overflow)
        during, change = scaler.cur_scale, scaler.apply_change()
        rows.append((during, scaler.cur_scale, change.reason if change else None, scaler.policy.at_minimum))
    assert rows == [
        (8.0, 8.0, None, False),
        (8.0, 8.0, "hysteresis", False),
        (8.0, 4.0, "overflow", False),
        (4.0, 4.0, None, True),
        (4.0, 4.0, None, False),
        (4.0, 4.0, None, False),
        (4.0, 8.0, "growth", False),
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_the_guard_discards_changes_nothing(policy):
    [(section, pattern)] = cases(1, policy=policy)
    scaler, undisturbed = LossScaler(section), LossScaler(section)
    for overflow in pattern:
        before = scaler.state_dict(), scaler.cur_scale
        with scaler.ignoring_overflow():
            scaler.update_scale(True)
        assert scaler.apply_change() is None and (scaler.state_dict(), scaler.cur_scale) == before
        take(scaler, overflow)
        take(undisturbed, overflow)
        assert scaler.state_dict() == undisturbed.state_dict()


def test_a_step_that_was_to_be_discarded_but_is_applied_is_an_error():
    scaler = LossScaler(LossScaleSection(initial=8.0, hysteresis=1))
    with pytest.raises(RuntimeError, match="was to be discarded"), scaler.ignoring_overflow():
        scaler.update_scale(False)
    take(scaler, True)
    assert scaler.cur_scale == 4.0
