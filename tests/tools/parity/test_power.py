"""Confidence in a verdict on whole runs: Student's t and its tables, power and chance, alarms over sound pairs."""

import math
import random
from statistics import fmean, stdev

import pytest
import torch

from config.schema import ParitySection
from tests.support.models.small_models import small_model
from tools.parity.judge_runs import Trajectory, confidence, confidence_line, judge_trajectories
from tools.parity.power import detectable, half_width, pairs_needed

BOUNDS = ParitySection()


@pytest.mark.parametrize("pairs", [4, 10])
def test_what_is_said_to_be_found_is_found_that_often_and_chance_no_more_than_it_is_allowed(pairs: int) -> None:
    """Normal deltas: it finds the stated shift in 9 of 10 series, and none where there is none in 19 of 20."""
    draw = random.Random(pairs)

    def share_found(shift: float, series: int = 4000) -> float:
        found = 0
        for _ in range(series):
            deltas = [draw.gauss(shift, 1.0) for _ in range(pairs)]
            found += abs(fmean(deltas)) > half_width(stdev(deltas), pairs, pairs - 1, confidence=0.95)
        return found / series

    assert share_found(detectable(1.0, pairs, pairs - 1)) == pytest.approx(0.9, abs=0.03)
    assert share_found(0.0) == pytest.approx(0.05, abs=0.012)


def test_the_number_of_pairs_is_the_fewest_that_suffice() -> None:
    needed = pairs_needed(0.01, 0.005, controls=2)
    assert needed is not None
    assert detectable(0.01, needed, needed + 1) <= 0.005 < detectable(0.01, needed - 1, needed)
    assert pairs_needed(1.0, 1e-4) is None
    assert pairs_needed(0.01, 0.005, power=0.5) < needed


def ended(loss: float) -> Trajectory:
    return Trajectory([1], [loss], [1.0], skipped=0, nonfinite=0, validation=loss)


def test_seeds_and_controls_are_pooled() -> None:
    """Three deltas of mean 0.1% around which they scatter, two controls around zero: four degrees of freedom."""
    mine, twins = [ended(4 * (1 + delta)) for delta in (0.0, 0.001, 0.002)], [ended(4.0)] * 3
    found = confidence(mine, twins, BOUNDS, [ended(4.004), ended(3.996)])
    scatter = math.sqrt((2 * 0.001**2 + 2 * 0.001**2) / 4)
    assert (found["pairs"], found["controls"], found["degrees"]) == (3, 2, 4)
    assert found["scatter"] == pytest.approx(scatter)
    half = 2.1318 * scatter / math.sqrt(3)
    assert found["interval"] == pytest.approx([0.001 - half, 0.001 + half], rel=1e-3)
    assert found["detectable"] == pytest.approx((2.7764 + 1.5332) * scatter / math.sqrt(3), rel=1e-4)
    assert found["shown"]
    assert "shows equivalence within 0.500%" in confidence_line(found)
    far = confidence([ended(4.016)] * 3, twins, BOUNDS, [ended(4.1), ended(3.9)])
    assert not far["shown"]
    assert f"takes {far['pairs_needed']} pairs" in confidence_line(far)


def test_one_pair_has_no_interval() -> None:
    found = confidence([ended(4.001)], [ended(4.0)], BOUNDS)
    assert found["scatter"] is None
    assert "no power" in confidence_line(found)


def trained(seed: int, compute: torch.dtype, rate: float) -> Trajectory:
    """A tiny Llama on a synthetic language: FP32 masters and AdamW, its weights rounded to `compute` for each step."""
    model = small_model("llama", vocab_size=32)
    shadow = small_model("llama", vocab_size=32).to(compute)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(32, (32, 4), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def batch(rows: int) -> torch.Tensor:
        tokens = [torch.randint(32, (rows,), generator=generator)]
        for _ in range(24):
            choice = torch.randint(4, (rows,), generator=generator)
            tokens.append(table[tokens[-1], choice])
        return torch.stack(tokens, 1)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        for master, weight in zip(model.parameters(), shadow.parameters(), strict=True):
            weight.data.copy_(master.data)
        logits = shadow(tokens[:, :-1], use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    losses, norms = [], []
    for _ in range(60):
        loss = loss_of(batch(8))
        shadow.zero_grad()
        loss.backward()
        for master, weight in zip(model.parameters(), shadow.parameters(), strict=True):
            master.grad = weight.grad.float()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(loss))
    with torch.no_grad():
        validation = float(loss_of(batch(64)))
    return Trajectory(range(1, 61), losses, norms, skipped=0, nonfinite=0, validation=validation)


@pytest.mark.slow
def test_the_share_of_false_alarms_over_sound_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    """Forty pairs of a BF16 run and its FP32 twin by another hand than the engine's; each judged as the gate does."""
    rate, alarms, deltas = 5e-3, {}, []
    for seed in range(40):
        mine, twin = (trained(seed, dtype, rate) for dtype in (torch.bfloat16, torch.float32))
        control = trained(seed, torch.float32, rate * (1 + 2.0**-8))
        deltas.append((mine.validation - twin.validation) / twin.validation)  # type: ignore[operator]
        for name, controls in (("alone", ()), ("with a control", (control,))):
            failed = [check.name for check in judge_trajectories([mine], [twin], BOUNDS, controls) if not check.passed]
            if failed:
                alarms.setdefault(name, []).append((seed, failed))
    covered = 0
    for start in range(0, 40, 4):  # series of four: does the interval have the mean of all?
        four = deltas[start : start + 4]
        covered += abs(fmean(four) - fmean(deltas)) <= half_width(stdev(four), 4, 3, confidence=0.9)
    with capsys.disabled():
        print(f"\nalarms of 40: {alarms}; deltas {fmean(deltas):+.4%}, sd {stdev(deltas):.4%}; covered {covered} of 10")
    assert len(alarms.get("with a control", [])) <= 2
    assert covered >= 6
