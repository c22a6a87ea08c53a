"""Weights in codes stand for what the definitions of NF4 and of rows of 8 bits say, and compute in any dtype."""

import logging

import pytest
import torch

NF4 = [  # Dettmers et al. 2023, appendix E
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
SHAPES = [(16, 32), (48, 32), (3, 40), (5, 7), (64, 96), (128, 128)]


def four_bits(weight: torch.Tensor, *, double: bool = False) -> torch.nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    from modeling.quantised_layers import freeze

    layer = Linear4bit(weight.shape[1], weight.shape[0], quant_type="nf4", compress_statistics=double)
    layer.weight = Params4bit(weight, quant_type="nf4", compress_statistics=double).to("cpu")
    freeze(layer)
    return layer


def eight_bits(weight: torch.Tensor) -> torch.nn.Module:
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    from modeling.quantised_layers import freeze

    layer = Linear8bitLt(weight.shape[1], weight.shape[0], has_fp16_weights=False)
    layer.weight = Int8Params(weight, requires_grad=False).to("cpu")
    freeze(layer)
    return layer


def nearest(weight: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Each value of a block of 64 as the nearest of NF4's 16 times the block's largest magnitude, or `scale`."""
    table = torch.tensor(NF4)
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    codes = ((blocks / largest)[..., None] - table).abs().argmin(-1)
    return (table[codes] * (largest if scale is None else scale)).flatten()[: weight.numel()].view(weight.shape)


@pytest.mark.parametrize("shape", SHAPES)
@torch.compiler.set_stance("force_eager")  # bitsandbytes compiles what it computes of odd sizes, in 9 s
def test_four_bits_are_those_of_the_definition_whatever_the_shape(shape: tuple[int, int]) -> None:
    """bitsandbytes 0.50.2 itself is wrong on a CPU where a row ends inside a block, by 20% to 70% of the weights."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    torch.manual_seed(0)
    weight = torch.randn(shape) * 0.2
    exact, layer, double = nearest(weight), four_bits(weight.clone()), four_bits(weight.clone(), double=True)
    assert torch.equal(layer.rebuilt(torch.float32), exact)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(layer.rebuilt(dtype), exact.to(dtype))
    assert float((double.rebuilt(torch.float32) - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("made", [four_bits, eight_bits])
def test_a_layer_computes_in_the_dtype_of_its_input_in_training_and_evaluation(made) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    torch.manual_seed(0)
    weight = torch.randn(48, 32) * 0.2
    layer = made(weight.clone())
    assert torch.allclose(layer.rebuilt(torch.float32), weight, atol=0.1 if made is four_bits else 0.004)
    before = layer.weight.detach().clone()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = (torch.randn(5, 32) * 100).to(dtype)  # LLM.int8 would round them
        plain = torch.nn.functional.linear(x, layer.rebuilt(dtype), layer.bias.to(dtype))
        assert torch.equal(layer.train()(x), plain)
        assert torch.equal(layer.eval()(x), plain)
        x.requires_grad_()
        out = torch.randn(5, 48).to(dtype)
        (gradient,) = torch.autograd.grad(layer(x), x, out)
        assert torch.equal(gradient, out @ layer.rebuilt(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(5, 32)).dtype == torch.bfloat16
    assert torch.equal(layer.weight, before)


def test_an_adapter_on_a_base_that_is_not_quantised_is_silent_of_its_kernels(caplog: pytest.LogCaptureFixture) -> None:
    """peft imports bitsandbytes where it is installed, which warns on CPUs with AVX512-BF16."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed")
    assert not caplog.records
