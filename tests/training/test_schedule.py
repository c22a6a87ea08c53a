"""The learning rate and the loss scale against definitions written out by hand, which upstream accepts."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from hypothesis import example, given
from hypothesis import strategies as st

from config.schema import LossScaleSection, ScheduleSection
from training.checkpoint.reader import PLAIN
from training.distributed import World
from training.loss_scaler import LossScaler
from training.schedule import learning_rate

NAMES = ["cosine", "linear", "wsd", "constant"]


@example(name="cosine", warmup=0, total=1, ratio=5e-324, peak=0.5, applied=1)
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
    assert 0 < now <= peak * (1 + 1e-9) or peak * ratio == 0  # which the smallest ratios make it, too
    if applied >= section.warmup_steps:
        assert then <= now * (1 + 1e-9)


def of_transformers(name, warmup, decay, total, ratio):
    """transformers' scheduler of that shape as a function of its step: the factor of the peak."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    if name == "constant":
        made = transformers.get_constant_schedule_with_warmup(optimizer, warmup)
    elif name == "linear":
        made = transformers.get_linear_schedule_with_warmup(optimizer, warmup, total)
    elif name == "wsd":
        counts = {"num_warmup_steps": warmup, "num_decay_steps": decay, "num_training_steps": total}
        made = transformers.get_wsd_schedule(optimizer, **counts, decay_type="linear", min_lr_ratio=ratio)
    elif ratio:
        make = transformers.get_cosine_with_min_lr_schedule_with_warmup
        made = make(optimizer, warmup, total, min_lr_rate=ratio)
    else:
        made = transformers.get_cosine_schedule_with_warmup(optimizer, warmup, total)
    return made.lr_lambdas[0]


@pytest.mark.parametrize("warmup", [0, 1, 40])
@pytest.mark.parametrize(
    ("name", "ratio"),
    [("cosine", 0.0), ("cosine", 0.1), ("linear", 0.0), ("wsd", 0.0), ("wsd", 0.1), ("constant", 0.1)],
)
def test_transformers_schedulers_give_the_same_rates_a_step_apart(name, ratio, warmup):
    """One step later than theirs during the warm-up, so that no step runs at 0; after it at the same step of a run one
    step shorter, so that the last step runs at the ratio. The peak is there twice: at the end of the warm-up and where
    the decay starts."""
    total = 450
    section = ScheduleSection(name=name, warmup_steps=warmup, final_ratio=ratio, decay_fraction=0.2)
    rates = [learning_rate(section, peak=2e-3, applied=n, total=total) for n in range(total)]
    # wsd's warm-up of theirs starts at the ratio, not at 0
    rising = of_transformers(name, warmup, 90, total - 1, 0.0 if name == "wsd" else ratio)
    falling = of_transformers(name, warmup, 90, total - 1, ratio)
    assert rates[:warmup] == pytest.approx([2e-3 * rising(n + 1) for n in range(warmup)])
    assert rates[warmup:] == pytest.approx([2e-3 * falling(n) for n in range(warmup, total)])
    assert rates[warmup] == rates[max(warmup - 1, 0)] == 2e-3
    if name != "constant":
        assert rates[-1] == pytest.approx(2e-3 * ratio) and rates[-2] > rates[-1]
    if name in ("cosine", "linear"):
        assert rates[warmup + 1] < 2e-3  # the peak is there twice, not three times


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
        raised = False
        for overflow in pattern:
            changes += take(ours, overflow) is not None
            upstream.update_scale(overflow)
            assert (ours.cur_scale, ours.policy.hysteresis) == (upstream.cur_scale, upstream.cur_hysteresis)
            try:
                if not raised:
                    raising.update_scale(overflow)
            except Exception as error:
                raised = "already at minimum" in str(error)
                assert ours.cur_scale == section.minimum, "and the guard ends the run"
        minima += raised
    return changes, minima


def test_the_trace_is_upstreams_down_to_the_minimum_where_upstream_raises(solo):
    [(changes, minima)] = solo.run(compare_with_upstream)
    assert changes > 300 and minima > 30


@pytest.mark.parametrize("policy", POLICIES)
def test_it_survives_a_round_trip_at_any_step(policy, tmp_path):
    """ZeRO's files carry it: pickled by DeepSpeed, read back by the reader that runs no code."""
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


def test_a_change_waits_for_the_end_of_the_step_and_says_why():
    scaler = LossScaler(LossScaleSection(initial=8.0, window=2, hysteresis=2, minimum=4.0))
    rows = []
    with scaler.ignoring_overflow():  # a step that the guard refuses for another reason
        scaler.update_scale(True)
    for overflow in (False, True, True, True, False, False, False):
        scaler.update_scale(overflow)
        during, change = scaler.cur_scale, scaler.apply_change()
        why = change and (change.reason, change.consecutive_overflows)
        rows.append((during, scaler.cur_scale, why))
    assert rows == [
        (8.0, 8.0, None),
        (8.0, 8.0, ("hysteresis", 1)),
        (8.0, 4.0, ("overflow", 2)),
        (4.0, 4.0, None),
        (4.0, 4.0, None),
        (4.0, 4.0, None),
        (4.0, 8.0, ("growth", 0)),
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
