"""A master as its BF16 weight and a remainder: every bit comes back, and the weight is the master, rounded."""

import pytest
import torch

from precision.split_masters import joined, remainder_of

SIGN = -(1 << 31)
SPECIAL = {
    "zeros": [0, SIGN],
    "infinities": [0x7F800000, 0x7F800000 + SIGN],
    "subnormals": [1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF, 0x7FFFFF + SIGN, 0x8000 + SIGN],
    "ties to an even weight, from below and from above": [0x3F808000, 0x3F818000, 0x3F808000 + SIGN, 0x3F818000 + SIGN],
    "next to a tie": [0x3F807FFF, 0x3F808001, 0x3F817FFF, 0x3F818001],
    "finite ones that round to infinity": [0x7F7FFFFF, 0x7F7F8000, 0x7F7FFFFF + SIGN],
    "the next power of two": [0x3FFFFFFF, 0x3FFF8000, 0x3FFF7FFF],
}


def floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def back(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bits of the master that comes back, weight)."""
    weight = master.bfloat16()
    remainder, uppers = remainder_of(master, weight)
    assert (remainder.dtype, uppers.dtype, len(uppers)) == (torch.int16, torch.uint8, -(-len(master) // 8))
    return joined(weight, remainder, uppers).view(torch.int32), weight


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("shift", range(3))
def test_special_values_come_back(kind: str, shift: int) -> None:
    """Also when others stand before them, so that their bits lie elsewhere in a byte."""
    bits = torch.tensor([0x3F800001] * shift + SPECIAL[kind], dtype=torch.int64)
    found, _ = back(floats(bits))
    assert torch.equal(found, bits.to(torch.int32))


def test_random_bits_come_back() -> None:
    """Every 256th has a tie in it, so that all weights are met with ties above and below them."""
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(SIGN, -SIGN, (1_000_003,), generator=draw)
    bits[::256] = (bits[::256] >> 16 << 16) + 0x8000
    master = floats(bits)
    bits, master = bits[~master.isnan()], master[~master.isnan()]
    found, weight = back(master)
    assert torch.equal(found, bits.to(torch.int32))
    assert torch.equal(found.view(torch.float32).bfloat16(), weight)


def test_nan_stays_nan() -> None:
    """Both master and weight stay NaN, whichever bits are set."""
    draw = torch.Generator().manual_seed(1)
    low, sign = torch.randint(1, 1 << 23, (10_000,), generator=draw), torch.randint(0, 2, (10_000,), generator=draw)
    master = floats(0x7F800000 + low - (sign << 31))
    assert master.isnan().all()
    found, weight = back(master)
    assert found.view(torch.float32).isnan().all()
    assert weight.isnan().all()
