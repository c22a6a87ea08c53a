"""The Triton kernel of the chunked loss: against FP64 in Triton's interpreter, and compiled ahead for three GPUs."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; make test-kernels has it")

from modeling import loss_kernel
from modeling.linear_cross_entropy import Head, linear_cross_entropy
from tests.modeling.test_chunked_loss import ROUNDOFF, draw, in_fp64, relative
from tests.support.models.triton_kernels import compiled, interpret


@pytest.fixture
def interpreted(monkeypatch):
    """`modeling.loss_kernel` whose kernel numpy computes."""
    interpret(loss_kernel, "softmax_gradient", monkeypatch)
    monkeypatch.setattr(loss_kernel, "_BLOCK", 16)
    return loss_kernel


@pytest.mark.parametrize(
    ("dtype", "chunk", "scale", "cap"),
    [(torch.bfloat16, 7, 1.0, None), (torch.float32, 1, 1 / 3, None), (torch.float16, 5, 1.0, 2.0)],
)
def test_value_and_gradients_are_those_of_fp64(interpreted, dtype, chunk: int, scale: float, cap: float | None) -> None:
    """Computed in chunks, with masked labels, weights, a scale and a soft cap, for an odd vocabulary."""
    tensors, labels = draw(dtype, bias=False, seed=chunk)
    hidden, weight, _ = tensors
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(chunk)) if chunk != 1 else None
    called = []

    def softmax(*arguments, **options):
        called.append(len(arguments[0]))
        return interpreted.fused_softmax(*arguments, **options)

    head = Head(weight, None, scale, cap, softmax=softmax)
    loss, losses = linear_cross_entropy(hidden, head, labels, chunk_tokens=chunk, gradient_scale=0.5, weights=weights)
    (0.5 * loss).backward()
    exact, gradients, of_labels = in_fp64(tensors, labels, scale, cap, 1.0 if weights is None else weights)
    assert sum(called) == labels.numel()
    assert relative(losses, of_labels) < 4 * ROUNDOFF[dtype]
    assert relative(loss.detach(), exact) < 4 * ROUNDOFF[dtype]
    for item, gradient in zip(tensors[:2], gradients, strict=False):
        assert item.grad.dtype == dtype
        assert relative(item.grad, 0.5 * gradient) < 8 * ROUNDOFF[dtype]


def test_it_is_as_close_to_fp64_as_torch_operators(interpreted) -> None:
    """Inputs have logits up to 60, and rows of a single logit that is not minus infinity."""
    generator = torch.Generator().manual_seed(0)
    logits = 20 * torch.randn(9, 50, generator=generator)
    logits[0, :40], logits[1, 10:] = -float("inf"), -float("inf")
    labels = torch.tensor([45, 3, 7, -100, 0, 49, 11, 15, 16])
    wide = logits.double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(wide, labels, reduction="none", ignore_index=-100)
    (gradient,) = torch.autograd.grad(exact.sum(), wide)
    losses = interpreted.fused_softmax(logits, labels, torch.ones(9), scale=1.0, cap=None)
    assert relative(losses, exact.detach()) < 1e-6 and losses[3] == 0
    assert relative(logits, gradient) < 1e-6 and not logits[3].any()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_is_seen_in_loss_and_gradient(interpreted, wrong: float) -> None:
    logits = torch.zeros(2, 50)
    logits[1, 30] = wrong
    labels = torch.tensor([4, 4])
    losses = interpreted.fused_softmax(logits, labels, torch.ones(2), scale=1.0, cap=None)
    assert losses.isfinite().tolist() == [True, False] and logits.isfinite().all(1).tolist() == [True, False]


def test_the_trial_on_a_device_notices_a_wrong_kernel(interpreted, monkeypatch) -> None:
    monkeypatch.setattr(interpreted, "_BLOCK", 4096)
    device, right = torch.device("cpu"), interpreted.fused_softmax
    assert interpreted.kernel_problem(device, torch.bfloat16) is None
    monkeypatch.setattr(interpreted, "fused_softmax", lambda *args, **options: 1.001 * right(*args, **options))
    assert "losses are" in interpreted.kernel_problem(device, torch.bfloat16)
    monkeypatch.setattr(
        interpreted, "fused_softmax", lambda given, *args, **options: right(given + 0, *args, **options)
    )
    assert "gradient is" in interpreted.kernel_problem(device, torch.bfloat16)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_it_compiles_ahead_for(capability: int, dtype: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {"logits": f"*{dtype}", "labels": "*i64", "factors": "*fp32", "every": "i32"}
    signature |= {"losses": "*fp32", "columns": "i32", "stride": "i64", "scale": "fp32", "cap": "fp32"}
    constants = {"CAPPED": dtype == "bf16", "IGNORED": -100, "BLOCK": 4096}
    compiled(loss_kernel.softmax_gradient, signature, constants, capability, num_warps=8)
