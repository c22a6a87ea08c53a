"""An FP32 master stored as its BF16 weight and the remainder that rounding dropped, bit for bit.

The weight is the upper half of its FP32 master, rounded to nearest, ties to even. The remainder is the master's bits
minus the weight's: -2^15 to 2^15, one number more than 16 bits hold. Both ends are ties, told apart by one extra bit
per value; apex's `store_param_remainders` has no such bit, and rounds ties away from zero (NVIDIA/apex, issue 1842).

Exact for every value except the bits of a NaN.
"""

import torch
from torch.nn.functional import pad

SPLIT_PIECE, SPLIT_PIECE_ON_A_GPU = 1 << 16, 1 << 23
"""[values] Number joined at once: few enough for a core's cache on a CPU, enough on a GPU to launch few kernels."""
SPLIT_BYTES = 2.125
"""[bytes] Storage per value, in addition to the weight."""
_GATHER_BITS = 0x0102040810204080
"""Multiplying eight bytes of 0 or 1 by this gathers them as bits in the top byte, the first byte as the lowest bit."""
_TIE = 1 << 15


def remainder_of(master: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(remainder, uppers) of (n,) FP32 masters: (n,) int16, and (ceil(n / 8),) uint8, a bit set for each upper tie."""
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
