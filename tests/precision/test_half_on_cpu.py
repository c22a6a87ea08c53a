"""Half-precision products without the CPU's help: FP32 sums, rounded once."""

import pytest
import torch

from precision import half_on_cpu
from precision.half_on_cpu import multiply_through_fp32
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
