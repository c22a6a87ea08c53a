"""Log-probabilities of tokens equal a log-softmax in FP64, values and gradients, however they are chunked."""

import pytest
import torch

from modeling import log_probs
from modeling.log_probs import token_log_probs


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_they_equal_fp64(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, off: float, chunk: int) -> None:
    monkeypatch.setattr(log_probs, "CHUNK_VALUES", chunk * 11)
    torch.manual_seed(0)
    logits = (torch.randn(2, 9, 11) * 4).to(dtype).requires_grad_()
    targets = torch.randint(0, 11, (2, 9))
    targets[0, :4] = -100
    weights = torch.randn(2, 9)
    found = token_log_probs(logits, targets, ignored=-100)
    assert found.dtype == torch.float32
    (found * weights).sum().backward()
    exact = logits.detach().double().requires_grad_()
    picked = exact.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != -100)
    (picked * weights.double()).sum().backward()
    assert torch.allclose(found.double(), picked, atol=1e-5)
    assert logits.grad is not None
    assert exact.grad is not None
    assert float((logits.grad.double() - exact.grad).norm() / exact.grad.norm()) < off
    assert not logits.grad[0, :4].any()
