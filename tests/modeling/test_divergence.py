"""Divergences equal plain FP64, have right gradients, are 0 of equal distributions, and never nan."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from modeling.objectives import divergence as module
from modeling.objectives.divergence import IDS, LOG_PROBS, Distillation, divergence, likeliest

KINDS = ["forward_kl", "reverse_kl", "jsd"]
VOCABULARY = 23


def draw(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(teacher: torch.Tensor, student: torch.Tensor, kind: str, beta: float) -> torch.Tensor:
    """The definition, from probabilities in FP64."""
    p, q = teacher.softmax(-1), student.softmax(-1)
    m = beta * p + (1 - beta) * q
    if kind == "forward_kl":
        return (p * (p / q).log()).sum(-1)
    if kind == "reverse_kl":
        return (q * (q / p).log()).sum(-1)
    return beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)


class Known:
    """A model whose logits are given."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def __call__(self, **inputs: Any) -> Any:
        assert IDS not in inputs and LOG_PROBS not in inputs, "a model does not know them"
        return self


def objective(teacher: torch.Tensor | None, **options: Any) -> Distillation:
    found = Distillation(**{"kind": "forward_kl", "beta": 0.5, "temperature": 1.0, "ce_weight": 0.0} | options)
    found.teacher = None if teacher is None else Known(teacher)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.05, 1.0, 4.0])
def test_gradients_are_those_of_the_loss(kind: Any, temperature: float) -> None:
    """At a low temperature softmax is nearly one-hot."""
    labels = torch.tensor([[3, -100, 0, 22]])
    of = objective(draw(1, 4, VOCABULARY), kind=kind, temperature=temperature, ce_weight=0.3, beta=0.3)
    student = draw(1, 4, VOCABULARY, seed=1, scale=0.3).requires_grad_()
    assert torch.autograd.gradcheck(lambda logits: of.score(Known(logits), {}, labels).loss, student)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_mixture_over_labels_whatever_the_chunks(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student = draw(2, 9, VOCABULARY), draw(2, 9, VOCABULARY, seed=1)
    labels = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(2))
    labels[0, 3:6] = -100
    counts = labels != -100
    apart = plain(teacher / 2.5, student / 2.5, kind, 0.3)
    entropy = functional.cross_entropy(student.flatten(0, 1), labels.flatten(), reduction="none").view(2, 9)
    each = torch.where(counts, 0.6 * 2.5**2 * apart + 0.4 * entropy, 0.0)
    exact = each.sum()
    for values in (1, 5 * VOCABULARY, 1000):
        monkeypatch.setattr(module, "CHUNK_VALUES", values)
        of = objective(teacher, kind=kind, temperature=2.5, ce_weight=0.4, beta=0.3)
        found = of.score(Known(student), {}, labels)
        torch.testing.assert_close(found.loss, exact)
        assert found.sums is not None and found.parts is not None
        torch.testing.assert_close(found.parts.view(2, 9), each)
        kl = plain(teacher / 2.5, student / 2.5, "forward_kl", 0)[counts].sum()
        same = (teacher.argmax(-1) == student.argmax(-1))[counts].sum()
        torch.testing.assert_close(found.sums, torch.stack([kl, entropy[counts].sum(), same.double()]))
    metrics = of.metrics(found.sums.tolist(), 15.0)
    assert metrics["teacher_agreement"] == pytest.approx(float(same) / 15)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_logits_have_no_divergence_and_no_gradient(kind: Any, dtype: torch.dtype) -> None:
    """Exactly 0 for both KLs; the mixture of the JSD is rounded once in FP32."""
    logits = draw(1, 8, 4096, scale=8).to(dtype)
    student = logits.clone().requires_grad_()
    loss = objective(logits, kind=kind).score(Known(student), {}, torch.zeros(1, 8, dtype=torch.int64)).loss
    loss.backward()
    assert student.grad is not None
    assert abs(float(loss.detach())) <= (1e-5 if kind == "jsd" else 0)
    assert float(student.grad.abs().max()) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_far_logits_give_finite_gradients(kind: Any) -> None:
    """softmax before log gives log 0 here: -inf, and nan gradients."""
    teacher, student = torch.tensor([[[0.0, 500.0, -500.0]]]), torch.tensor([[[0.0, -500.0, 500.0]]]).requires_grad_()
    loss = objective(teacher, kind=kind).score(Known(student), {}, torch.zeros(1, 1, dtype=torch.int64)).loss
    loss.backward()
    assert student.grad is not None and torch.isfinite(loss.detach()) and bool(torch.isfinite(student.grad).all())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_among_the_likeliest_is_one_outcome(kind: Any) -> None:
    teacher, student = draw(1, 6, VOCABULARY), draw(1, 6, VOCABULARY, seed=1)
    labels = torch.zeros(1, 6, dtype=torch.int64)
    full = float(objective(teacher, kind=kind, temperature=1.5).score(Known(student), {}, labels).loss)
    before = 0.0
    for k in (1, 4, VOCABULARY - 1):
        ids, log_probs = likeliest(teacher[0].float(), k=k, temperature=1.5)
        inputs = {IDS: ids[None], LOG_PROBS: log_probs[None]}
        leaf = student.clone().requires_grad_()
        loss = objective(None, kind=kind, temperature=1.5).score(Known(leaf), inputs, labels).loss
        p, q = (draws[0].div(1.5).softmax(-1) for draws in (teacher, student))
        grouped = [torch.cat([x.gather(1, ids.long()), 1 - x.gather(1, ids.long()).sum(1, True)], 1) for x in (p, q)]
        exact = plain(grouped[0].log(), grouped[1].log(), kind, 0.5).sum() * 1.5**2
        assert float(loss.detach()) == pytest.approx(float(exact), rel=1e-5)
        assert before <= float(loss.detach()) <= full + 1e-5, "more outcomes can only tell more apart"
        before = float(loss.detach())
        if k == 4:
            grouping = objective(None, kind=kind)
            assert torch.autograd.gradcheck(
                lambda x, of=grouping, given=inputs: of.score(Known(x), given, labels).loss, leaf, atol=1e-4
            )
    assert before == pytest.approx(full, rel=1e-5), "all but one, and that one"


@pytest.mark.parametrize(("apart", "lost"), [(0.05, 0.05), (0.5, 0.01)])
def test_a_kl_in_fp32_is_right_where_one_in_bf16_is_not(apart: float, lost: float) -> None:
    """The numbers of docs/finetuning.md."""
    generator = torch.Generator().manual_seed(0)
    teacher = (3 * torch.randn(64, 32768, generator=generator)).bfloat16()
    student = (teacher.float() + apart * torch.randn(64, 32768, generator=generator)).bfloat16()

    def of(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = student.to(dtype).clone().requires_grad_()
        kl = divergence(teacher.to(dtype).log_softmax(-1), leaf.log_softmax(-1), kind="forward_kl")
        kl.sum().backward()
        assert leaf.grad is not None
        return kl.detach().double(), leaf.grad.double()

    exact, slope = of(torch.float64)
    for dtype, least, most in ((torch.float32, 0.0, 1e-4), (torch.bfloat16, lost, 1.0)):
        kl, gradient = of(dtype)
        error = float((gradient - slope).norm() / slope.norm())
        assert least <= error <= most
        assert (float((kl - exact).abs().max()) > 0.01) is (dtype == torch.bfloat16)
