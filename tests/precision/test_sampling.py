"""Statistics of many tensors at once, against those of one tensor in FP64."""

import math

import pytest
import torch

from precision import sampling
from tests.support.models.gradient_oracle import underflow_share


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
