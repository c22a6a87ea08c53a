"""The Triton kernel that rounds to FP8: bit by bit in Triton's interpreter, and compiled ahead for three GPUs."""

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; make test-kernels has it")

from precision import fp8, fp8_kernel, fp8_reference
from tests.support.models.triton_kernels import compiled, interpret


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`precision.fp8_kernel` whose kernel numpy computes, a few values at a time."""
    interpret(fp8_kernel, "round_rows", monkeypatch)
    monkeypatch.setattr(fp8_kernel, "_TILE", 64)
    return fp8_kernel


def numbers() -> torch.Tensor:
    """(37, 90) FP32: rows of all sizes, ties and subnormals of both formats, zeros, and what is not finite."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.tensor([1.0, 1e-3, 1e4, 1e-38, 1e-43, 1e30, 3e38, 2.0**-120]).repeat_interleave(2)[:, None]
    random = torch.randn(16, 90, generator=generator).clamp(-1, 1) * sizes * torch.logspace(-6, 0, 90)
    ties = torch.cat([torch.arange(-448, 448, 0.5), torch.arange(-2, 2, 2.0**-4) * 2.0**-9]).view(-1)[: 18 * 90]
    rows = torch.cat([random, ties.repeat(2)[: 18 * 90].view(18, 90), torch.zeros(3, 90)])
    rows[16:34, 0] = 448.0
    rows[34, 3], rows[35, 4], rows[35, 5] = math.inf, -math.inf, math.nan
    return rows


@pytest.mark.parametrize("kind", fp8.FORMATS)
@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16", "transposed", "a slice"])
def test_values_and_scales_are_those_of_the_definition(interpreted: Any, kind: Any, form: str) -> None:
    wide = numbers()
    given = {
        "fp32": wide,
        "bf16": wide.bfloat16() * (wide.abs() >= 2.0**-126),  # Triton's interpreter misreads BF16's subnormal numbers
        "fp16": wide.clamp(-6e4, 6e4).half(),
        "transposed": wide.t().contiguous().t(),
        "a slice": torch.cat([wide, wide], 1)[:, :90],
    }[form]
    narrow, scales = interpreted.quantise_rows(given, fp8.FORMATS[kind])
    expected, of_rows = fp8.quantise(given, -1, fp8.FORMATS[kind])
    assert narrow.dtype == fp8.FORMATS[kind] and narrow.is_contiguous() and scales.shape == (37, 1)
    some = (given != 0).any(1)  # a row of zeros may have any scale
    assert torch.equal(scales[some].nan_to_num(7.0), of_rows[some].nan_to_num(7.0))
    found = narrow.double() * scales
    for other in (expected.double() * of_rows, fp8_reference.rounded(given, kind, "row")):
        assert torch.equal(found.isnan(), other.isnan())
        assert torch.equal(found.nan_to_num(), other.nan_to_num())


def test_the_trial_on_a_device_notices_a_wrong_kernel(interpreted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreted, "_TILE", 2048)
    device, right = torch.device("cpu"), interpreted.quantise_rows
    assert interpreted.kernel_problem(device) is None
    monkeypatch.setattr(interpreted, "quantise_rows", lambda values, dtype: right(1.01 * values, dtype))
    assert "otherwise than torch" in interpreted.kernel_problem(device)
    monkeypatch.setattr(interpreted, "quantise_rows", lambda values, dtype: right(values[0], dtype))
    assert "cannot run" in interpreted.kernel_problem(device)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("dtype", "rows"), [("fp32", 1), ("fp32", 32), ("bf16", 1)])
def test_it_compiles_ahead_for(capability, dtype, rows, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {"values": f"*{dtype}", "codes": "*u8", "scales": "*fp32", "count": "i32", "columns": "i32"}
    signature |= {"row_stride": "i64", "column_stride": "i64"}
    mantissa, bias, top = fp8_kernel._FIELDS[torch.float8_e4m3fn]
    constants = {"MANTISSA": mantissa, "BIAS": bias, "TOP": top, "ROWS": rows, "BLOCK": 2048 // rows}
    made = compiled(fp8_kernel.round_rows, signature, constants, capability)
    assert "mul.ftz" not in made.asm["ptx"] and "add.ftz" not in made.asm["ptx"]  # subnormal numbers count
