"""An FP32 master as its BF16 weight and what rounding took from it, bit for bit.

The weight is the upper half of its FP32 master, rounded to the nearest, ties to even. What is left is the master's bits
minus the weight's: -2^15 to 2^15, one number more than 16 bits have. Both ends are ties, told apart by one more bit a
value; apex's `store_param_remainders` has no such bit, and rounds ties away from zero (NVIDIA/apex, issue 1842).

Exact for every value but the bits of a NaN.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

SPLIT_PIECE, SPLIT_PIECE_ON_A_GPU = 1 << 16, 1 << 23
"""[values] Number joined at once: on a CPU they stay in a core's cache, on a GPU few kernels are started."""
SPLIT_BYTES = 2.125
"""[bytes] Size of one value, beside the weight."""
_GATHER_BITS = 0x0102040810204080
"""Multiplied with eight bytes of 0 or 1, the uppermost byte has the eight as bits, the first lowest."""
_TIE = 1 << 15


def remainder_of(master: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(remainder, uppers) of (n,) FP32 masters: (n,) int16, and (ceil(n / 8),) uint8, a bit for each tie above."""
    upper = weight.view(torch.int16).int().bitwise_left_shift_(16)
    apart = torch.sub(master.view(torch.int32), upper, out=upper)
    return apart.to(torch.int16), _packed(apart == _TIE)


def joined(weight: torch.Tensor, remainder: torch.Tensor, uppers: torch.Tensor) -> torch.Tensor:
    """(n,) FP32: the masters. weight: (n,) BF16; remainder, uppers: as `remainder_of` returns them."""
    bits = weight.view(torch.int16).int().bitwise_left_shift_(16).add_(remainder)
    return bits.add_(_unpacked(uppers, len(bits)).int().bitwise_left_shift_(16)).view(torch.float32)


def _packed(flags: torch.Tensor) -> torch.Tensor:
    """(n,) bool -> (ceil(n / 8),) uint8."""
    eights = pad(flags, (0, -len(flags) % 8)).view(torch.int64)
    return ((eights * _GATHER_BITS) >> 56).bitwise_and_(0xFF).to(torch.uint8)


def _unpacked(packed: torch.Tensor, count: int) -> torch.Tensor:
    """(ceil(n / 8),) uint8 -> (n,) uint8 of 0 and 1."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return packed[:, None].bitwise_right_shift(places).bitwise_and_(1).view(-1)[:count]
