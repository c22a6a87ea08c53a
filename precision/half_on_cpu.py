"""BF16 and FP16 matrix products on a CPU that has no instructions for them: computed in FP32, rounded once."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu_backward")
"""The operators that torch computes element by element if the instructions are missing."""

_LIBRARY = torch.library.Library("aten", "IMPL")
"""Kernels registered in it stay in effect as long as it exists."""


@functools.cache
def multiply_through_fp32() -> frozenset[torch.dtype]:
    """Compute products of half dtypes that the CPU has no instructions for in FP32 from now on; returns these dtypes.

    Such an instruction multiplies exactly, sums in FP32 and rounds the sum. FP32 products of the same values, rounded
    once, equal that up to the order of summation, and beat torch's own kernels there (docs/lab-notebook.md).
    """
    lacking = frozenset(
        dtype
        for dtype, has_instructions in (
            (torch.bfloat16, torch.ops.mkldnn._is_mkldnn_bf16_supported),
            (torch.float16, torch.ops.mkldnn._is_mkldnn_fp16_supported),
        )
        if not has_instructions()
    )
    if lacking:
        for name in PRODUCTS:
            kernel = _through_fp32(torch.library.get_kernel(f"aten::{name}", "CPU"), lacking)
            with warnings.catch_warnings():
                # torch warns when a kernel replaces another.
                warnings.simplefilter("ignore")
                _LIBRARY.impl(name, kernel, "CPU", with_keyset=True)
    return lacking


def _through_fp32(kernel: Any, lacking: frozenset[torch.dtype]) -> Callable[..., Any]:
    def product(keys: Any, first: torch.Tensor, *rest: Any, **options: Any) -> Any:
        dtype = first.dtype
        if dtype not in lacking:
            return kernel.call_boxed(keys, first, *rest, **options)

        def widened(value: Any) -> Any:
            return value.float() if isinstance(value, torch.Tensor) and value.dtype == dtype else value

        wide = kernel.call_boxed(keys, widened(first), *map(widened, rest), **options)
        return wide.to(dtype) if isinstance(wide, torch.Tensor) else tuple(part.to(dtype) for part in wide)

    return product
