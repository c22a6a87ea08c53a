"""The rules of the stability envelope, on oracles whose answer is known."""

import math
import random

import pytest

from config.schema import ParitySection
from lab.envelope.search import (
    PATIENCE,
    Cell,
    DivergenceWatch,
    Setting,
    Trial,
    Tried,
    climb,
    explore,
    parity_failure,
)

BOUNDS = ParitySection(loss_gap=0.02, validation_delta=0.005)
RATES = [0.001 * 2**power for power in range(9)]


def watched(losses, *, most_skips=20, norms=None, routine=False, applied=None):
    """(step, reason) of the first failure that the watch sees; None without one."""
    watch = DivergenceWatch(window=5, most_skips=most_skips)
    for index, loss in enumerate(losses):
        norm = norms[index] if norms else 1.0
        here = applied[index] if applied else True
        why = watch.failure(loss, grad_norm=norm, routine=routine, applied=here)
        if why:
            return index + 1, why
    return None


def learning(steps=60, noise=0.03, seed=0):
    """A noisy loss that falls from 5.5 to about 3."""
    generator = random.Random(seed)
    return [(3 + 2.5 * math.exp(-step / 10)) * (1 + generator.gauss(0, noise)) for step in range(steps)]


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_learns_does_not_fail(seed):
    assert watched(learning(seed=seed)) is None


def test_one_wild_step_is_no_divergence_and_a_rise_is():
    losses = learning(noise=0)
    losses[20] *= 3
    assert watched(losses) is None
    risen = losses[:30] + [losses[29] * 1.2] * 10
    step, why = watched(risen)
    assert step in (33, 34) and "rose from 3" in why
    assert watched([5.5, 6.2, 6.2, 6.2])[0] == 3  # above the first loss


def test_what_is_not_finite_fails_unless_the_loss_scale_answers_it():
    assert watched([5.0, math.nan]) == (2, "the loss is nan")
    assert watched([5.0, math.inf], routine=True) == (2, "the loss is inf")
    norms, applied = [1.0, math.inf, 1.0], [True, False, True]
    assert watched([5.0, 5.0, 5.0], norms=norms, applied=applied) == (2, "the gradient is not finite")
    assert watched([5.0, 5.0, 5.0], norms=norms, applied=applied, routine=True) is None


def test_too_many_skips_in_a_row_fail():
    applied = [False, False, True, False, False, False]
    assert watched([5.0] * 6, applied=applied, most_skips=3) == (6, "3 steps in a row were skipped")
    assert watched([5.0] * 6, applied=applied, most_skips=4) is None


def trial(losses, validation=3.0, **further):
    return Trial(tuple(losses), validation, skipped=0, **further)


def test_parity_is_the_running_median_everywhere_and_the_validation_loss_at_the_end():
    curve = learning()
    reference = trial(curve)
    assert parity_failure(trial(curve), reference, BOUNDS) is None
    assert parity_failure(trial([loss * 1.019 for loss in curve]), reference, BOUNDS) is None
    departed = parity_failure(trial(curve[:30] + [loss * 1.03 for loss in curve[30:]]), reference, BOUNDS)
    assert departed is not None and 29 <= departed[0] <= 33
    better = parity_failure(trial([loss * 0.97 for loss in curve]), reference, BOUNDS)
    assert better is not None and better[0] == 1, "better than FP32 is not the same as FP32"
    smooth = learning(noise=0)
    assert parity_failure(trial([*smooth[:30], 9.0, *smooth[31:]]), trial(smooth), BOUNDS) is None, "one wild step"
    assert parity_failure(trial(curve, validation=3.014), reference, BOUNDS) is None
    late = parity_failure(trial(curve, validation=3.016), reference, BOUNDS)
    assert late == (60, "the validation loss is 0.53% from FP32's")
    assert parity_failure(trial(curve, validation=None), reference, BOUNDS) is None
    failed = trial(curve[:7], validation=None, failed_step=7, why="the loss is nan")
    assert parity_failure(failed, reference, BOUNDS) == (7, "the loss is nan")


def climbed(passes):
    """A cell whose trials, one after the other, pass or do not; the rates that were asked for."""
    asked = []

    def attempt(rate):
        asked.append(rate)
        step, why = (None, None) if passes[len(asked) - 1] else (1, "bad")
        return Tried(rate, step, why, skipped=0, steps=5)

    return Cell(Setting(2, 8, "bf16"), climb(RATES, attempt)), asked


@pytest.mark.parametrize("bearable", range(len(RATES) + 1))
def test_climbing_finds_the_largest_rate_and_stops_after_two_failures(bearable):
    cell, asked = climbed([True] * bearable + [False] * len(RATES))
    assert cell.largest == (RATES[bearable - 1] if bearable else None)
    assert asked == RATES[: bearable + PATIENCE]
    assert cell.lucky == []


def test_a_pass_above_a_failure_is_luck():
    cell, _ = climbed([True, False, True, False, False, True])
    assert cell.largest == RATES[0] and cell.lucky == [RATES[2]]
    assert [item.rate for item in cell.tried] == RATES[:5]


class Oracle:
    """Trials that are stable up to a rate of their own by setting, within parity up to another."""

    def __init__(self, stable, agrees):
        self.stable, self.agrees = stable, agrees
        self.asked = []

    def __call__(self, setting, rate):
        self.asked.append((setting, rate))
        if rate > self.stable.get(setting, 1.0):
            return Trial((5.0, 9.0), None, 0, failed_step=2, why="it rose")
        return trial([4.0] * 10, validation=3.0 if rate <= self.agrees.get(setting, 1.0) else 3.3)


def test_every_setting_is_compared_with_fp32_of_its_own_place():
    sound, weak, shaky = Setting(2, 8, "bf16"), Setting(4, 8, "bf16"), Setting(4, 8, "fp16", "adaptive")
    small, large = Setting(2, 8, "fp32"), Setting(4, 8, "fp32")
    oracle = Oracle(stable={small: 0.064, large: 0.016, shaky: 0.004}, agrees={weak: 0.008})
    cells = {cell.setting: cell for cell in explore([sound, weak, shaky], RATES, BOUNDS, oracle)}
    found = {setting: cell.largest for setting, cell in cells.items()}
    assert found == {small: 0.064, sound: 0.064, large: 0.016, weak: 0.008, shaky: 0.004}
    assert max(rate for setting, rate in oracle.asked if setting == weak) == 0.016, "no further than FP32 holds"
    assert (cells[shaky].tried[-1].step, cells[shaky].tried[-1].why) == (2, "it rose")


def test_where_fp32_holds_nowhere_nothing_else_is_tried():
    place = Setting(2, 8, "fp32")
    oracle = Oracle(stable={place: 0.0}, agrees={})
    cells = list(explore([Setting(2, 8, "bf16")], RATES, BOUNDS, oracle))
    assert [cell.largest for cell in cells] == [None, None]
    assert oracle.asked == [(place, RATES[0]), (place, RATES[1])]
