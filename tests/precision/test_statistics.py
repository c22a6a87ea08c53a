"""Statistics, robust scores and cross entropy against oracles, tolerances against the arithmetic they bound."""

import json
import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from modeling.linear_cross_entropy import label_loss_sum
from precision import sampling, statistics
from precision.robust_window import RobustWindow
from tests.support.agreement import agrees
from tests.support.models.gradient_oracle import underflow_share

HALF = torch.float16, torch.bfloat16


def spread(count: int, low: int, high: int, seed: int = 0) -> torch.Tensor:
    """Random float64 values with magnitudes from 2^low to 2^high, either sign."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.rand(count, generator=generator, dtype=torch.float64) * (high - low) + low
    return torch.exp2(exponent) * torch.randint(0, 2, (count,), generator=generator).mul(2).sub(1)


def test_gradients_are_compared_as_plain_python_does():
    mine, other = spread(200, -5, 5, seed=1), spread(200, -5, 5, seed=2)
    other[:3] = mine[:3] = 0
    measured = statistics.to_plain(statistics.compare_gradients([("w", mine)], [("w", other), ("unused", other)]))["w"]
    a, b = mine.tolist(), other.tolist()
    norms = [math.sqrt(sum(x * x for x in values)) for values in (a, b)]
    assert measured["cosine"] == pytest.approx(sum(x * y for x, y in zip(a, b, strict=True)) / norms[0] / norms[1])
    same = sum((x > 0) - (x < 0) == (y > 0) - (y < 0) for x, y in zip(a, b, strict=True))
    assert measured["sign_agreement"] == pytest.approx(same / 200)
    error = math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True))) / norms[1]
    assert measured["relative_error"] == pytest.approx(error)


@pytest.mark.parametrize(("size", "agreement"), [(1e-6, 1900 / 2000), (1e-4, 1900 / 2000), (1e-2, 2400 / 3000)])
def test_signs_of_rounding_noise_are_not_compared(size, agreement):
    """A third of a fused bias's gradients, those of its keys, is noise up to 1e-4 of the others, and none at 1e-2."""
    reference = torch.randn(3000, generator=torch.Generator().manual_seed(0)).abs().clamp(min=0.1)
    reference[:1000] *= size
    gradient = reference.clone()
    gradient[:500] *= -1  # noise has any sign
    gradient[-100:] *= -1
    found = statistics.compare_gradients([("b", gradient)], [("b", reference)])["b"]
    assert float(found.sign_agreement) == pytest.approx(agreement)


def test_comparisons_with_zero_and_wrong_shapes():
    one, zero = torch.ones(2), torch.zeros(2)
    compare = lambda a, b: tuple(map(float, statistics.compare_gradients([("w", a)], [("w", b)])["w"]))  # noqa: E731
    assert compare(zero, zero) == (1.0, 1.0, 0.0)
    assert compare(one, zero) == (0.0, 0.0, math.inf)
    assert compare(zero, one) == (0.0, 0.0, 1.0)
    assert compare(-3 * one, one) == pytest.approx((-1.0, 0.0, 4.0))
    with pytest.raises(ValueError, match="w: shape"):
        compare(one, torch.ones(3))
    with pytest.raises(KeyError):
        statistics.compare_gradients([("w", one)], [])


def test_the_meter_sees_every_call_and_leaves_nothing_behind():
    layer = nn.Linear(1, 1, bias=False)
    model = nn.Sequential(layer, layer, nn.ReLU())
    nn.init.constant_(layer.weight, -3.0)
    with statistics.ActivationMeter(model) as meter:
        model(torch.tensor([[1.0]]))
        model(torch.tensor([[0.5]]))
    model(torch.tensor([[100.0]]))
    assert statistics.to_plain(meter.maxima) == {"0": 9.0, "2": 9.0, "Sequential": 9.0}
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("terms", [4, 64, 1024])
def test_sums_stay_within_the_tolerance_and_come_near_it(dtype, terms):
    """Summed one after the other, rounded every time: 200 sums."""
    generator = torch.Generator().manual_seed(terms)
    rows = torch.randn(200, terms, generator=generator).to(dtype)
    total = torch.zeros(200, dtype=dtype)
    for column in rows.unbind(1):
        total = total + column
    exact, magnitude = rows.double().sum(1), rows.double().abs().sum(1)
    assert agrees(total, exact, dtype, terms, magnitude=magnitude)
    assert not agrees(total, exact, dtype, terms, magnitude=magnitude / 1000), "the bound says nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_and_largest_values_are_of_every_value(dtype):
    torch.manual_seed(0)
    tensors = [(torch.randn(count) * scale).to(dtype) for count, scale in ((1, 1.0), (1000, 1e-3), (70_001, 30.0))]
    for found, values in zip(sampling.sums_of_squares(tensors), tensors, strict=True):
        assert float(found) == pytest.approx(float(values.double().square().sum()), rel=1e-5)
    for found, values in zip(sampling.largest(tensors), tensors, strict=True):
        assert float(found) == float(values.double().abs().max())
    assert math.isnan(float(sampling.largest_of(torch.tensor([1.0, math.nan, 2.0]).to(dtype))))
    assert math.isinf(float(sampling.largest_of(torch.tensor([1.0, -math.inf]).to(dtype))))


def test_a_sample_is_spread_evenly_and_of_small_tensors_whole():
    assert sampling.sampled(torch.arange(10.0)).tolist() == list(range(10))
    found = sampling.sampled(torch.arange(1_000_000.0))
    assert 8_000 < len(found) <= sampling.SAMPLE and float(found[0]) == 0.0 and float(found[-1]) > 990_000
    assert len(set(found.diff().tolist())) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exponents_give_the_shares_that_a_dtype_loses(dtype):
    torch.manual_seed(0)
    info = torch.finfo(dtype)
    spread = torch.randn(3000) * torch.exp2(torch.randint(-30, 10, (3000,)).float()) * info.smallest_normal * 2**8
    samples = [spread[:1], spread, torch.zeros(5), torch.cat([spread[:100], torch.zeros(50)])]
    counts = sampling.exponent_counts(samples)
    assert counts.sum(1).tolist() == [len(sample) for sample in samples]
    assert counts[:, -1].tolist() == [int((sample == 0).sum()) for sample in samples]
    limits = (info.smallest_normal, info.smallest_normal * info.eps / 2)
    bins = torch.tensor([[*map(sampling.bins_below, limits), sampling.EXPONENTS]]).expand(len(samples), -1)
    for row, sample in zip(sampling.counts_in_bins(counts, bins).tolist(), samples, strict=True):
        lost, (small, gone, nonzero) = underflow_share(sample, dtype), row
        assert nonzero == int((sample != 0).sum())
        assert small / max(nonzero, 1) == pytest.approx(lost[0], abs=1e-6)
        if dtype is torch.float16:  # BF16's end lies below what FP32's exponents tell apart
            assert gone / max(nonzero, 1) == pytest.approx(lost[1], abs=1e-6)
    powers = sampling.exponent_counts([torch.tensor([1.0, 1.99, -2.0, 3.5, 0.25])])[0]
    assert powers[127:129].tolist() == [2, 2] and int(powers[125]) == 1


def test_a_distance_is_relative_to_the_rounded_master():
    master = torch.tensor([1.0, 1.001, 0.0, -4.0])
    weight = master.to(torch.bfloat16)
    assert sampling.distances(master, weight).tolist() == [0.0, 0.0]
    weight[3] = -6.0
    assert sampling.distances(master, weight).tolist() == [0.5, 0.25]
    weight[2] = 1.0
    assert math.isinf(float(sampling.distances(master, weight)[0]))


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@DTYPES
@pytest.mark.parametrize("spread", [1.0, 100.0, 5000.0])
def test_cross_entropy_of_huge_logits(dtype, spread):
    """The loss of a token is a difference of numbers of the logits' size: its error is relative to those."""
    logits = draw(4, 8, 128, dtype=dtype, scale=spread)
    labels = torch.randint(128, (4, 8), generator=torch.Generator().manual_seed(1))
    wide = logits.double()
    exact = functional.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum")
    magnitude = 2 * wide.abs().amax(-1).sum()
    got = label_loss_sum(logits, labels)
    assert got.dtype == torch.float32
    assert agrees(got, exact, torch.float32, 128 + 32, magnitude=magnitude)
    probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    naive = -probabilities.log().flatten(0, 1)[torch.arange(32), labels.flatten()].sum()
    if spread > 1 or dtype != torch.float32:
        assert not agrees(naive, exact, torch.float32, 128 + 32, magnitude=magnitude)


NUMBER = st.floats(-1e6, 1e6)


def oracle(values: list[float], value: float, floor: float) -> float:
    array = numpy.array(values, dtype=numpy.float64)
    center = numpy.median(array)
    spread = numpy.median(numpy.abs(array - center)) * 1.482602218505602
    return float((value - center) / max(spread, floor))


def filled(values: list[float], size: int) -> RobustWindow:
    window = RobustWindow(size)
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
    window = filled([2.0] * 10, 10)
    assert window.score(2.0) == 0
    assert window.score(2.05) == pytest.approx(5.0)


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
