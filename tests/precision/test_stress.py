"""Cross entropy at extreme magnitudes in each dtype against FP64; the naive way fails.

Tolerances come from precision/tolerance.py: `terms` is the number of roundings in a row, an operation that is exact up
to one rounding counting as one. Sums inside run in FP32, so that a 16-bit result has one rounding of its own, or two
where a 16-bit intermediate is rounded first.
"""

import pytest
import torch
from torch.nn import functional

from modeling.linear_cross_entropy import label_loss_sum
from tests.support.agreement import agrees

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
