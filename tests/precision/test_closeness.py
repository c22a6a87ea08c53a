"""Results that are as close to the exact values as plain torch's pass; others do not."""

import pytest
import torch

from precision.closeness import distance
from precision.tolerance import unit_roundoff

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def values(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(64, 96) products of a linear layer and the same in FP64."""
    draw = torch.Generator().manual_seed(seed)
    given, weight = (torch.randn(rows, 48, generator=draw).to(dtype) for rows in (64, 96))
    exact = given.double() @ weight.double().T
    return exact.to(dtype), exact


def excess(run: torch.Tensor, plan: torch.Tensor, exact: torch.Tensor) -> float:
    error, bound = distance(run, plan, exact, roundoff=unit_roundoff(plan.dtype)).tolist()
    return error / bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(20))
def test_another_rounding_of_the_same_values_is_as_close(dtype: torch.dtype, seed: int) -> None:
    plan, exact = values(seed, dtype)
    draw = torch.Generator().manual_seed(seed + 100)
    up = torch.rand(exact.shape, generator=draw, dtype=torch.float64) * 2 - 1
    run = (exact * (1 + up * unit_roundoff(dtype) * 0.2)).to(dtype)
    assert not torch.equal(run, plan)
    assert excess(run, plan, exact) < 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.01, 1.001, 0.99])
def test_a_factor_below_a_rounding_shows(dtype: torch.dtype, factor: float) -> None:
    plan, exact = values(0, dtype)
    assert excess((exact * factor).to(dtype), plan, exact) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rounding_too_many_without_a_direction_shows(dtype: torch.dtype) -> None:
    plan, exact = values(0, dtype)
    u = unit_roundoff(dtype)
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert excess((exact * (1 + 12 * u * noise)).to(dtype), plan, exact) > 1


def test_one_token_that_holds_the_energy_hides_nothing() -> None:
    plan, exact = values(0, torch.bfloat16)
    scale = torch.ones(64, 1)
    scale[5] = 1e4
    exact = exact * scale
    plan = exact.bfloat16()
    run = plan.clone()
    run[6:] = (exact[6:] * 1.01).bfloat16()
    assert excess(run, plan, exact) > 1


def test_values_that_are_not_finite_are_no_rounding() -> None:
    plan, exact = values(0, torch.float16)
    run = plan.clone()
    run[0, 0] = torch.inf
    assert excess(run, plan, exact) == torch.inf


def test_values_that_the_dtype_has_exactly_have_to_be_these() -> None:
    exact = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16().double()
    plan = exact.bfloat16()
    assert excess(plan, plan, exact) == 0
    assert excess((exact * 1.01).bfloat16(), plan, exact) > 1


def test_an_error_in_a_few_rows_is_no_scatter_of_its_own() -> None:
    plan, exact = values(0, torch.bfloat16)
    run = plan.clone()
    run[::8] = (exact[::8] * torch.linspace(0.8, 1.2, 96)).bfloat16()
    assert excess(run, plan, exact) > 1
