"""A Triton kernel for rounding to FP8 with a scale for each row: `precision.fp8.quantise` in one launch.

torch's operators move 27 bytes a value, in kernels for the magnitudes, their maximum, the quotient and the cast. Here
each value is read twice, the second time from cache, and written once in 8 bits. Rows may be strided in memory, as in a
transposed weight. Bits are computed as integers, so that the result does not depend on a device's division or cast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from config.errors import one_line
from precision.fp8 import FORMATS, quantise

_FIELDS = {torch.float8_e4m3fn: (3, 7, 8), torch.float8_e5m2: (2, 15, 15)}
"""Stored bits of the mantissa, bias of the exponent, and exponent of the largest number, whose mantissa is 1.75."""
_TILE = 2048  # [values] Number held by a program at a time


@triton.jit
def round_rows(  # type: ignore[no-untyped-def]  # Triton evaluates annotations
    values,
    codes,
    scales,
    count,
    columns,
    row_stride,
    column_stride,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = rows < count
    values += rows[:, None] * row_stride
    codes += rows[:, None] * columns
    largest = tl.zeros([ROWS], tl.int32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK).to(tl.int64)[None, :]
        inside = here[:, None] & (at < columns)
        x = tl.load(values + at * column_stride, mask=inside, other=0.0).to(tl.float32)
        # without the sign, bit patterns are ordered like the numbers, with inf and nan above all others
        largest = tl.maximum(largest, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
    finite = largest < 0x7F800000
    exponent = (largest >> 23) - TOP + tl.where((largest & 0x7FFFFF) > 0x600000, 1, 0)
    exponent = tl.minimum(tl.maximum(exponent, 1), 254)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(scales + rows, tl.where(finite, scale, float("nan")), mask=here)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    DROPPED: tl.constexpr = 23 - MANTISSA
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK).to(tl.int64)[None, :]
        inside = here[:, None] & (at < columns)
        x = tl.load(values + at * column_stride, mask=inside, other=0.0).to(tl.float32) * inverse[:, None]
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        even = (size >> DROPPED) & 1
        normal = ((size + (1 << (DROPPED - 1)) - 1 + even) >> DROPPED) - ((127 - BIAS) << MANTISSA)
        # next to this power of two FP32 is spaced as FP8's subnormal numbers are, so the sum rounds to them
        power = tl.full([ROWS, BLOCK], (151 - BIAS - MANTISSA) << 23, tl.int32)
        sums = size.to(tl.float32, bitcast=True) + power.to(tl.float32, bitcast=True)
        code = tl.where(size < ((128 - BIAS) << 23), sums.to(tl.int32, bitcast=True) - power, normal)
        code = tl.where(finite[:, None], code | ((bits >> 24) & 0x80), 0x7F)
        tl.store(codes + at, code.to(tl.uint8), mask=inside)


def quantise_rows(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, columns) values / scale in `dtype`, contiguous, and (rows, 1) FP32 scales. values: FP32 or narrower."""
    count, columns = values.shape
    codes = torch.empty(count, columns, dtype=torch.uint8, device=values.device)
    scales = torch.empty(count, 1, dtype=torch.float32, device=values.device)
    mantissa, bias, top = _FIELDS[dtype]
    rows = 1 if values.stride(1) == 1 else 32  # neighbours in memory are read together
    fields = {"MANTISSA": mantissa, "BIAS": bias, "TOP": top, "ROWS": rows, "BLOCK": _TILE // rows}
    round_rows[(triton.cdiv(count, rows),)](values, codes, scales, count, columns, *values.stride(), **fields)
    return codes.view(dtype), scales


def kernel_problem(device: torch.device) -> str | None:
    """Why the kernel does not round random numbers as `quantise` does on this device; None if it does."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(70, 300, generator=generator) * torch.logspace(-6, 0, 300)
    values[3, 5], values[4, 6] = torch.inf, torch.nan
    try:
        for dtype in FORMATS.values():
            for given in (values, values.t(), values.bfloat16()):
                expected, found = (
                    narrow.float() * scale
                    for narrow, scale in (quantise(given, -1, dtype), quantise_rows(given.to(device), dtype))
                )
                if not torch.equal(found.cpu().nan_to_num(7.0), expected.nan_to_num(7.0)):
                    return f"it rounds to {dtype} otherwise than torch"
    except Exception as problem:  # whatever Triton and its compiler may raise
        return f"it cannot run: {one_line(problem, 200)}"
    return None
