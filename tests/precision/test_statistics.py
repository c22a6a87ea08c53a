"""Statistics against pure-Python oracles, tolerances against the arithmetic they bound."""

import math

import pytest
import torch
from torch import nn

from precision import statistics
from tests.support.agreement import agrees

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
