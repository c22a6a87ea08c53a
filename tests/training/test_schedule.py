"""The learning rate against a definition written out by hand."""

import pytest
import torch
import transformers
from hypothesis import example, given
from hypothesis import strategies as st

from config.schema import ScheduleSection
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
