"""Half-precision products on the CPU, results as close as plain torch's, and masters split into BF16 and a rest."""

import pytest
import torch

from precision import half_on_cpu
from precision.closeness import distance
from precision.half_on_cpu import multiply_through_fp32
from precision.split_masters import joined, remainder_of
from precision.tolerance import unit_roundoff
from tests.support.jobs.process_group import ProcessGroup
from training.distributed import World

HALVES = (torch.bfloat16, torch.float16)
KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def replaced(name: str):
    """The operator as a CPU that lacks both would compute it, called as the dispatcher calls it."""
    kernel = half_on_cpu._through_fp32(torch.library.get_kernel(f"aten::{name}", "CPU"), frozenset(HALVES))
    return lambda *arguments, **options: kernel(KEYS, *arguments, **options)


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("seed", range(5))
def test_each_element_is_the_fp64_sum_rounded_once(dtype: torch.dtype, seed: int) -> None:
    a, b, c = (drawn(31, 31, dtype=dtype, seed=10 * seed + i) for i in range(3))
    for name, arguments in (("mm", (a, b.t())), ("addmm", (c, a, b)), ("bmm", (a[None], b[None]))):
        exact = getattr(torch, name)(*(x.double() for x in arguments))
        got = replaced(name)(*arguments)
        assert got.dtype == dtype
        # Half a unit in the last place of the result, and FP32's own error in 31 terms.
        bound = exact.abs() * torch.finfo(dtype).eps / 2 + 31 * 2**-24 * (a.double().abs() @ b.double().abs()).max()
        assert ((got.double() - exact).abs() <= bound).all()


def test_options_reach_the_kernel() -> None:
    a, b, c = (drawn(8, 8, dtype=torch.bfloat16, seed=i) for i in range(3))
    got = replaced("addmm")(c, a, b, beta=0.5, alpha=2.0)
    torch.testing.assert_close(got, (0.5 * c.float() + 2 * a.float() @ b.float()).bfloat16(), rtol=0, atol=0)


def test_a_sum_beyond_fp16s_range_is_infinite_and_one_within_it_is_not() -> None:
    big = torch.full((1, 4), 200.0, dtype=torch.float16)
    assert replaced("mm")(big, big.t() * torch.tensor([1, 1, -1, -1], dtype=torch.float16)[:, None]).item() == 0
    assert replaced("mm")(big, big.t()).item() == float("inf")


def test_other_dtypes_go_their_own_way() -> None:
    a = drawn(16, 16, dtype=torch.float64, seed=0)
    assert torch.equal(replaced("mm")(a, a), a @ a)
    a = a.float()
    assert torch.equal(replaced("mm")(a, a), a @ a)


def products_and_gradients(world: World, *, dtype: torch.dtype) -> bool:
    """Results from a process of their own: the setting holds until the process ends."""
    if dtype not in multiply_through_fp32():
        return False
    a, b = (drawn(64, 64, dtype=dtype, seed=i).requires_grad_() for i in range(2))
    product = a @ b
    assert torch.equal(product, (a.float() @ b.float()).to(dtype))
    product.backward(torch.ones_like(product))
    assert torch.equal(a.grad, (torch.ones(64, 64) @ b.float().t()).to(dtype))
    return True


@pytest.mark.parametrize("dtype", HALVES)
def test_a_process_that_asked_for_it_computes_so_and_differentiates(solo: ProcessGroup, dtype: torch.dtype) -> None:
    if solo.run(products_and_gradients, dtype=dtype) != [True]:
        pytest.skip(f"this CPU has instructions for {dtype}")


def gradients_within_attention(world: World, *, dtype: torch.dtype) -> None:
    multiply_through_fp32()
    leaves = [drawn(2, 4, 48, 16, dtype=dtype, seed=i).requires_grad_() for i in range(3)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    for queries, keys, values in (leaves, exact):
        attended = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        attended.square().sum().backward()
    for leaf, reference in zip(leaves, exact, strict=True):
        error = (leaf.grad.double() - reference.grad).norm() / reference.grad.norm()
        assert leaf.grad.dtype == dtype and error < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_within_attention_are_near_fp64s(solo: ProcessGroup, dtype: torch.dtype) -> None:
    solo.run(gradients_within_attention, dtype=dtype)


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
    """Others may stand before them, so that their bits lie elsewhere in a byte."""
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
