"""The distance of sampler and trainer: sound noise of any size is none, another policy is one."""

import numpy as np
import pytest

from training.rollouts.gap import FLOOR, Gap

PROMPTS, TOKENS = 16, 96


def gap_of(apart: np.ndarray, own: np.ndarray, gap: Gap | None = None) -> dict[str, float]:
    """The gap over a step's prompts (PROMPTS, TOKENS), beside the trainer's distance from itself."""
    return (gap or Gap(3.0)).measure(
        apart[:, None], np.ones((len(apart), 1, apart.shape[1]), bool), [[own * 0.5, own, own]]
    )


def test_the_estimates_are_those_of_the_definition() -> None:
    apart = np.random.default_rng(0).normal(0.01, 0.1, (PROMPTS, TOKENS))
    found = gap_of(apart, apart[0] * 2)
    assert found["gap/k1"] == pytest.approx(-apart.mean())
    assert found["gap/k3"] == pytest.approx((np.exp(apart) - 1 - apart).mean())
    assert found["gap/largest"] == pytest.approx(np.abs(apart).max())
    assert found["gap/one_sided"] == pytest.approx(abs(apart.mean()) / np.abs(apart).mean())
    assert found["gap/outside"] == pytest.approx((np.abs(np.exp(apart) - 1) > 0.1).mean())
    wide = 2 * apart[0]
    assert found["gap/self_k3"] == pytest.approx((np.exp(wide) - 1 - wide).mean())


@pytest.mark.parametrize("size", [1e-7, 1e-5, 3e-3, 0.04])
def test_two_hundred_sound_steps_of_any_dtype_are_within_the_bounds(size: float) -> None:
    """Tokens of a prompt are alike, as of a tiny model: their differences are drawn once for 8 of them."""
    draw, gap = np.random.default_rng(1), Gap(3.0)
    largest = 0.0
    for _ in range(200):
        apart = draw.normal(0, size, (PROMPTS, TOKENS // 8)).repeat(8, axis=1)
        own = draw.normal(0, size, 64)
        largest = max(largest, gap_of(apart, own, gap)["gap/of_bound"])
    assert largest < 1


def test_a_larger_distance_and_one_that_is_one_sided_are_beyond() -> None:
    draw = np.random.default_rng(2)
    own, apart = draw.normal(0, 0.04, 64), draw.normal(0, 0.04, (PROMPTS, TOKENS))
    assert gap_of(2.2 * apart, own)["gap/of_bound"] > 1
    assert gap_of(np.abs(apart), own)["gap/of_bound"] > 1
    assert gap_of(-np.abs(apart), own)["gap/of_bound"] > 1


def test_few_prompts_that_lean_to_one_side_by_chance_are_within_the_bounds() -> None:
    """Tokens of a prompt are alike: their differences are drawn once for each of 4, as in a step of 64 answers."""
    draw, own = np.random.default_rng(4), np.random.default_rng(5).normal(0, 0.08, 64)
    found = [gap_of(draw.normal(0, 0.04, (4, 1)).repeat(16, axis=1), own)["gap/of_bound"] for _ in range(2000)]
    assert np.mean(np.array(found) > 1) < 0.003
    assert gap_of(draw.normal(-0.1, 0.01, (4, 16)), own)["gap/of_bound"] > 1
    assert gap_of(draw.normal(-0.04, 0.0, (1, 16)), own)["gap/one_sided"] == 1 and gap_of(own[None], own)


def test_noise_in_the_trainer_alone_does_not_hide_itself() -> None:
    """As dropout in its log-probabilities: the trainer is as far from itself as from the sampler."""
    draw = np.random.default_rng(3)
    noise, rounding = draw.normal(0, 0.04, 64), draw.normal(0, 0.001, 64)
    gap = Gap(3.0)
    apart = draw.normal(0, 0.04, (PROMPTS, 1, TOKENS))
    found = gap.measure(apart, np.ones_like(apart, bool), [[noise, noise, rounding]])
    assert found["gap/of_bound"] > 1


def test_exact_agreement_is_none() -> None:
    found = gap_of(np.zeros((PROMPTS, TOKENS)), np.zeros(8))
    assert found["gap/of_bound"] == found["gap/one_sided"] == 0 and found["gap/self_k3"] == FLOOR


def test_quarters_are_those_of_each_answer() -> None:
    apart = np.array([[[0.0, 0.0, 0.1, 0.2], [0.1, 9.0, 9.0, 9.0]]])
    mask = np.arange(4) < np.array([[[4], [1]]])
    found = Gap(3.0).measure(apart, mask, [[apart[0, 0]] * 3])
    k3 = [np.expm1(d) - d for d in (0.1, 0.1, 0.2)]
    quarters = [found[f"gap/k3_quarter_{number}"] for number in range(1, 5)]
    assert quarters == pytest.approx([k3[0] / 2, 0.0, k3[1], k3[2]])
