"""A cast to float8_e4m3fn turns inf into 448: behind scales of earlier steps nobody sees that a value was not finite.

Where (torch 2.13.0): `torch/headeronly/util/Float8_e4m3fn.h`, since https://github.com/pytorch/pytorch/pull/178817 also
on a CPU. E4M3 has no inf; saturating is what the format's specification allows and torchao wants
(https://github.com/pytorch/ao/pull/4364). nan stays nan, and `float8_e5m2` keeps inf.

Expected: a matmul whose input has an inf has a result that is not finite, as in every wider dtype. A scale made of the
input itself does that, for it is inf too; a delayed scale, made of the amax of an earlier step, does not.

Run: python docs/upstream/fp8_cast_hides_inf.py

Printed (torch 2.13.0, CPU):

    inf as BF16, E5M2, E4M3: inf, inf, 448.0
    input with an inf: values of the product that are not finite
    BF16: 32 of 2048; FP8, scale of this input: 2048; FP8, scale of the step before: 0
    verdict: the defect is there
"""

import sys

import torch


def product(x: torch.Tensor, w: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """x @ w^T with both rounded to E4M3 under one scale a tensor, that of x made of a given amax."""
    scales = amax / 448.0, w.abs().amax() / 448.0
    rounded = [(t / s).to(torch.float8_e4m3fn).float() * s for t, s in zip((x, w), scales, strict=True)]
    return rounded[0] @ rounded[1].t()


def lost(y: torch.Tensor) -> int:
    return int((~y.isfinite()).sum())


torch.manual_seed(0)
before, x, w = torch.randn(64, 128), torch.randn(64, 128), torch.randn(32, 128)
x[3, 5] = float("inf")
cast = [
    float(torch.tensor(float("inf")).to(d).float()) for d in (torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)
]
print(f"inf as BF16, E5M2, E4M3: {cast[0]}, {cast[1]}, {cast[2]}")
print("input with an inf: values of the product that are not finite")
plain, dynamic = lost((x.bfloat16() @ w.bfloat16().t()).float()), lost(product(x, w, x.abs().amax()))
delayed = lost(product(x, w, before.abs().amax()))
print(f"BF16: {plain} of 2048; FP8, scale of this input: {dynamic}; FP8, scale of the step before: {delayed}")
print("verdict: the defect is there" if delayed == 0 else "verdict: fixed")
sys.exit(int(delayed == 0))
