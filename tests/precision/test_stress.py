"""Critical paths at extreme magnitudes in each dtype against FP64; each also shows that the naive way fails.

Tolerances come from precision/tolerance.py: `terms` is the number of roundings in a row, an operation that is exact up
to one rounding counting as one. Sums inside run in FP32, so that a 16-bit result has one rounding of its own, or two
where a 16-bit intermediate is rounded first.
"""

import math

import pytest
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from modeling.linear_cross_entropy import label_loss_sum
from precision.tolerance import tolerance
from tests.support.agreement import agrees

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
WIDTH = 256
MANY = 6.0
"""Confidence for tests that look at thousands of results: each may fail with probability 3e-8."""


def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@DTYPES
@pytest.mark.parametrize("spread", [1.0, 30.0, 3000.0])
def test_softmax_of_huge_scores(dtype, spread):
    """Relative error of exp(x - max) is that of x - max times itself: u |x - max| of FP32, then one rounding."""
    scores = draw(64, WIDTH, dtype=dtype, scale=spread)
    exact = scores.double().softmax(-1)
    reach = float((scores.double().amax(-1, keepdim=True) - scores.double()).clamp(max=104).max())  # exp(-104) is 0
    allowed = tolerance(2, dtype) + tolerance(WIDTH, torch.float32, confidence=MANY) + reach * 2.0**-24
    info = torch.finfo(dtype)
    error = (scores.softmax(-1).double() - exact).abs()
    assert bool((error <= allowed * exact + info.smallest_normal * max(info.eps, 2.0**-23)).all())
    naive = scores.exp() / scores.exp().sum(-1, keepdim=True)
    if spread > 100:
        assert not bool(naive.isfinite().all())


@DTYPES
@pytest.mark.parametrize("at_the_top", [False, True])
def test_rms_norm_of_huge_and_tiny_activations(dtype, at_the_top):
    """Squares in FP32: right for every 16-bit value that the format holds up to 1e18, where FP16 squares overflow."""
    scale = {torch.float16: 4000.0}.get(dtype, 1e17) if at_the_top else {torch.float16: 1e-2}.get(dtype, 1e-2)
    hidden = draw(32, WIDTH, dtype=dtype, scale=scale)
    norm = LlamaRMSNorm(WIDTH, eps=1e-6).to(dtype)
    wide = hidden.double()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    # The sum of squares has no cancellation; three more roundings follow, and one to the format.
    allowed = tolerance(WIDTH + 3, torch.float32, confidence=MANY) + tolerance(1, dtype)
    got = norm(hidden).detach().double()
    assert bool(((got - exact).abs() <= allowed * exact.abs()).all())
    if dtype == torch.float16 and at_the_top:
        naive = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
        assert not bool(((naive.double() - exact).abs() <= allowed * exact.abs()).all())


@DTYPES
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_layer_norm_far_from_zero(dtype, offset):
    """The mean is subtracted before squaring. E[x^2] - E[x]^2 loses everything when the mean is large."""
    scale = 100.0 if offset else 4000.0
    further = 101 if dtype == torch.float32 else 1  # FP32 forgives more
    hidden = (draw(32, WIDTH, dtype=torch.float32, scale=scale) + offset * further).to(dtype)
    wide = hidden.double()
    exact = functional.layer_norm(wide, (WIDTH,))
    got = functional.layer_norm(hidden, (WIDTH,))
    # x - mean is off by FP32's error of the mean, relative to the spread.
    deviation = wide.std(-1, unbiased=False, keepdim=True)
    mean_error = tolerance(WIDTH, torch.float32, confidence=MANY) * wide.abs().mean(-1, keepdim=True) / deviation
    rounding = tolerance(WIDTH, torch.float32, confidence=MANY) + tolerance(1, dtype)
    allowed = mean_error * (1 + exact.abs()) + exact.abs() * rounding
    assert bool(((got.double() - exact).abs() <= allowed).all())
    mean = hidden.mean(-1, keepdim=True)
    naive = (hidden - mean) * torch.rsqrt((hidden * hidden).mean(-1, keepdim=True) - mean**2 + 1e-5)
    if offset or dtype == torch.float16:
        assert not bool(((naive.double() - exact).abs() <= allowed).all())


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


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
def test_attention_with_huge_logits(dtype, scale):
    """Scores up to 1e5, where a softmax picks one key, against exp without the maximum subtracted."""
    scales = (scale, scale, 1.0)
    query, key, value = (draw(1, 2, 32, 16, dtype=dtype, scale=s, seed=seed) for seed, s in enumerate(scales))
    q, k, v = query.double(), key.double(), value.double()
    scores = q @ k.transpose(-1, -2) / 4
    exact = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    got = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    # An error e of a score changes each weight by a factor exp(2 e); a score may pass through the 16-bit format.
    score_error = float((q.abs() @ k.abs().transpose(-1, -2) / 4).max()) * tolerance(16, torch.float32, confidence=MANY)
    probability_error = math.expm1(2 * score_error) + tolerance(32, torch.float32, confidence=MANY)
    allowed = (probability_error + 2 * tolerance(1, dtype)) * v.abs().amax()
    assert bool(((got.double() - exact).abs() <= allowed).all())
    if scale == 100.0:
        assert float(scores.max()) > 1e4
        weights = (query @ key.transpose(-1, -2) / 4).exp().tril()
        assert not bool((weights / weights.sum(-1, keepdim=True)).isfinite().all())


@HALF
def test_one_large_and_many_tiny_gradients_accumulate_in_fp32_only(dtype):
    """1 + 4096 times u/2: in 16 bits each addition rounds back to 1, in FP32 the sum is right."""
    tiny = torch.finfo(dtype).eps / 4
    micro_batches = [torch.ones(8), *([torch.full((8,), tiny)] * 4096)]
    exact = torch.full((8,), 1 + 4096 * tiny, dtype=torch.float64)
    wide, narrow = torch.zeros(8), torch.zeros(8, dtype=dtype)
    for gradient in micro_batches:
        wide += gradient.to(dtype)
        narrow += gradient.to(dtype)
    assert agrees(wide, exact, torch.float32, 4097)
    assert bool((narrow == 1).all()), "16-bit accumulation keeps nothing of the tiny values"
    assert not agrees(narrow, exact, dtype, 1)


@DTYPES
def test_random_micro_batches_accumulate_in_fp32(dtype):
    """Random values over eight orders of magnitude: FP32 within its bound, 16 bits outside of it."""
    magnitude = torch.logspace(-6, 2, 256, dtype=torch.float64).unsqueeze(1)
    gradients = (draw(256, 64, dtype=torch.float32).double() * magnitude).to(dtype)
    exact, size = gradients.double().sum(0), gradients.double().abs().sum(0)
    wide, narrow = torch.zeros(64), torch.zeros(64, dtype=dtype)
    for gradient in gradients:
        wide += gradient
        narrow += gradient
    assert agrees(wide, exact, torch.float32, 256, magnitude=size, confidence=MANY)
    if dtype != torch.float32:
        assert not agrees(narrow, exact, torch.float32, 256, magnitude=size, confidence=MANY)


@pytest.mark.parametrize("scale", [3000.0, 1e-5])
def test_a_gradient_norm_in_fp16_needs_fp32_squares(scale):
    """Above 256 a square overflows FP16, under 1.7e-4 it is flushed to zero."""
    gradient = draw(4096, dtype=torch.float16, scale=scale)
    exact = gradient.double().square().sum()
    assert agrees(gradient.float().square().sum(), exact, torch.float32, 4097)
    naive = (gradient * gradient).sum()
    assert float(naive) in (math.inf, 0.0)
    assert not agrees(naive, exact, torch.float16, 4097)
