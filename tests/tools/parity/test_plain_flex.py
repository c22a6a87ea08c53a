"""FlexAttention is measured: plain torch computes what its kernel does, in FP32, FP64 and the plan's dtype."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.attention.flex_attention as of_torch
import transformers.integrations.flex_attention as of_transformers

from modeling.compiling import quote_library_folders
from tests.support.models.flex_on_cpu import flex_on_cpu
from tests.tools.parity.test_signature import ATTENTION, attention_output, measured, named
from tools.parity.plain_flex import flex_attention


def in_blocks(query: Any, key: Any, value: Any, *, score_mod: Any, block_mask: Any, scale: float, **_: Any) -> Any:
    """Rounds as a fused kernel may: exponentials that are not divided yet are 16-bit; sums, the product and gradients
    of the scores FP32."""
    key, value = (item.repeat_interleave(query.shape[1] // item.shape[1], dim=1) for item in (key, value))
    scores = query.float() @ key.float().transpose(2, 3) * scale
    size = scores.shape
    seen = of_torch.create_mask(block_mask.mask_mod, size[0], size[1], size[2], size[3], "cpu")
    scores = scores.masked_fill(~seen, -torch.inf)
    exponentials = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    rounded = exponentials + (exponentials.to(value.dtype).float() - exponentials).detach()
    product = rounded @ value.float()
    return (product / exponentials.sum(-1, keepdim=True)).to(query.dtype)


@pytest.fixture(autouse=True, scope="module")
def a_path_with_a_space() -> None:
    """transformers has masks of blocks compiled, which fails where the path to torch has a space or a quote."""
    quote_library_folders()


@contextmanager
def run_with(kernel: Any) -> Iterator[None]:
    with mock.patch.object(of_transformers, "WrappedFlexAttention", lambda training: lambda: kernel):
        yield


@pytest.mark.parametrize("capped", [False, True])
def test_it_computes_what_torch_does(capped: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, heads, 40, 16, generator=draw) for heads in (4, 2, 2))

    def score(given: torch.Tensor, sample: Any, head: Any, row: Any, column: Any) -> torch.Tensor:
        return 2.0 * torch.tanh(given / 2.0) if capped else given

    def window(sample: Any, head: Any, row: Any, column: Any) -> Any:
        return (row >= column) & (row - column < 7)

    mask = of_torch.create_block_mask(window, None, None, 40, 40, device="cpu")
    expected = of_torch.flex_attention(query, key, value, score_mod=score, block_mask=mask, enable_gqa=True)
    found = flex_attention(query, key, value, score_mod=score, block_mask=mask, scale=None)
    assert torch.allclose(found, expected, atol=1e-6)
    exact = flex_attention(
        *(item.double() for item in (query, key, value)), score_mod=score, block_mask=mask, scale=None
    )
    assert exact.dtype == torch.float64
    assert 0 < float((found - exact).abs().max()) < 1e-6


def test_its_gradients_are_rounded_where_torchs_are() -> None:
    """Bit for bit, by torch's formulas for any device; and in FP64 they are those of finite differences."""
    draw = torch.Generator().manual_seed(2)
    given = [torch.randn(2, heads, 24, 16, generator=draw).bfloat16() for heads in (4, 2, 2, 4)]

    def causal(sample: Any, head: Any, row: Any, column: Any) -> Any:
        return row >= column

    def gradients(attend: Any) -> tuple[torch.Tensor, ...]:
        query, key, value = (item.clone().requires_grad_() for item in given[:3])
        return torch.autograd.grad(attend(query, key, value), (query, key, value), given[3])

    mask = of_torch.create_block_mask(causal, None, None, 24, 24, device="cpu")
    with flex_on_cpu():
        kernel: Any = of_transformers.WrappedFlexAttention(True)()
        expected = gradients(lambda *those: kernel(*those, block_mask=mask, enable_gqa=True))
    how: dict[str, Any] = {"score_mod": lambda score, *_: score, "block_mask": mask, "scale": None}
    found = gradients(lambda *those: flex_attention(*those, **how))
    for mine, other in zip(found, expected, strict=True):
        assert torch.allclose(mine.float(), other.float(), rtol=2**-7, atol=1e-4)
        assert float((mine == other).float().mean()) > 0.98  # products are summed up in another order

    def with_sums(*those: torch.Tensor) -> Any:
        output, aux = flex_attention(*those, **how, return_aux=True)
        return output, aux.lse

    small = [item[:1, :2, :, :4].double().requires_grad_() for item in given[:3]]
    assert torch.autograd.gradcheck(with_sums, small)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "compute"), [("qwen3", "bf16"), ("gemma3_text", "fp16")])
def test_flex_attention_is_measured_without_an_alarm(family: str, compute: str) -> None:
    with run_with(in_blocks):
        steps = measured(family, compute, attention="flex_attention", tokens=32)
        assert named(steps) == ()
        parts = {(row["module"], row["part"]) for row in steps[0]["parts"]}
        assert {(ATTENTION, "into o_proj"), (ATTENTION, "gradient of what v_proj returned")} <= parts
        assert steps[0]["not_measured"] == {}
        wrong = measured(family, compute, attention="flex_attention", tokens=32, plant=attention_output(1.01))
        assert named(wrong) == (ATTENTION,)


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_torchs_own_flex_attention_raises_no_alarm(family: str, compute: str) -> None:
    for seed in range(4):
        with flex_on_cpu():
            assert named(measured(family, compute, attention="flex_attention", tokens=32, seed=seed, steps=2)) == ()
        with run_with(in_blocks):
            assert named(measured(family, compute, attention="flex_attention", tokens=32, seed=seed, steps=2)) == ()
