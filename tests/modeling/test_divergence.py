"""Divergences, log-probabilities and policy-gradient losses equal plain FP64 and have right gradients."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional

from config.schema import GrpoSection
from config.task import ALGORITHMS, DECIDED
from modeling import log_probs
from modeling.log_probs import entropies, token_log_probs
from modeling.objectives import divergence as module
from modeling.objectives import policy
from modeling.objectives.divergence import IDS, LOG_PROBS, Distillation, divergence, likeliest
from modeling.objectives.policy import PolicyGradient, advantages, counts_of

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


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_they_equal_fp64(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, off: float, chunk: int) -> None:
    monkeypatch.setattr(log_probs, "CHUNK_VALUES", chunk * 11)
    torch.manual_seed(0)
    logits = (torch.randn(2, 9, 11) * 4).to(dtype).requires_grad_()
    targets = torch.randint(0, 11, (2, 9))
    targets[0, :4] = -100
    weights = torch.randn(2, 9)
    found = token_log_probs(logits, targets)
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


TOKENS, LENGTH, ANSWERS = 11, 9, 6


def section(**given: Any) -> GrpoSection:
    decided = dict(zip(DECIDED, ALGORITHMS[given.get("algorithm", "grpo")], strict=True))
    return GrpoSection(**(decided | {"max_new_tokens": 7} | given))


class Model(torch.nn.Module):
    """A table of logits: enough to have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(TOKENS, TOKENS, dtype=torch.float64))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        class Output:
            logits = self.table[input_ids]

        return Output


def drawn(seed: int) -> tuple[Model, dict[str, torch.Tensor], torch.Tensor]:
    """A model, and answers of uneven length, one of them with its end as padding's token."""
    torch.manual_seed(seed)
    model, ids = Model(), torch.randint(TOKENS, (ANSWERS, LENGTH))
    labels = torch.full_like(ids, -100)
    for row in range(ANSWERS):
        labels[row, 1 : 2 + row] = torch.randint(TOKENS, (1 + row,))
    labels[2, 3] = 0
    inputs = {"input_ids": ids, policy.ADVANTAGE: torch.randn(ANSWERS), policy.REWARD: torch.rand(ANSWERS)}
    inputs[policy.ENDED] = torch.ones(ANSWERS)
    with torch.no_grad():
        now = model.table[ids].log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    for name, spread in ((policy.OLD, 0.3), (policy.SAMPLER, 0.9), (policy.REFERENCE, 0.5)):
        inputs[name] = now + spread * torch.randn(ANSWERS, LENGTH)
    return model, inputs, labels


def plain_policy_loss(
    given: GrpoSection, model: Model, inputs: dict[str, Any], labels: torch.Tensor
) -> tuple[Any, int]:
    """The papers' sum, in plain loops, and what it is divided by."""
    total: Any = 0.0
    count = 0
    for row in range(ANSWERS):
        places = [place for place in range(LENGTH) if labels[row, place] != -100]
        log_probs = []
        for place in places:
            logits = model.table[inputs["input_ids"][row, place]] / given.temperature
            log_probs.append(logits[labels[row, place]] - logits.exp().sum().log())
        old, mu, ref = (
            [inputs[name][row, place] for place in places] for name in (policy.OLD, policy.SAMPLER, policy.REFERENCE)
        )
        rhos = [(a - b).exp() for a, b in zip(log_probs, old, strict=True)]
        mean = (sum(a - b for a, b in zip(log_probs, old, strict=True)) / len(places)).exp()
        losses = []
        advantage = inputs[policy.ADVANTAGE][row]
        for t in range(len(places)):
            ratio = mean if given.ratio == "sequence" else rhos[t]
            if given.surrogate == "cispo":
                loss = -min(float(ratio.detach()), given.clip_high) * advantage * log_probs[t]
            else:
                low, high = 1 - given.clip_low, 1 + given.clip_high
                bounded = low + 0 * ratio if ratio < low else high + 0 * ratio if ratio > high else ratio
                gains = (ratio * advantage, bounded * advantage)
                loss = -(gains[0] if gains[0] <= gains[1] else gains[1])
            weight = math.exp(old[t] - mu[t])
            if given.correction == "truncate":
                loss = loss * min(weight, given.correction_high)
            if given.correction == "mask":
                loss = loss * (weight if 1 / given.correction_high <= weight <= given.correction_high else 0.0)
            k1 = log_probs[t] - ref[t]
            losses.append(loss + given.beta * rhos[t] * ((-k1).exp() - 1 + k1))
        total = total + (sum(losses) / len(losses) if given.loss == "sequence" else sum(losses))
        count += {"sequence": 1, "token": len(places), "constant": given.max_new_tokens}[str(given.loss)]
    return total, count


CASES = [
    *({"algorithm": name} for name in ALGORITHMS),
    *(
        {"algorithm": name, "correction": correction, "beta": 0.3, "temperature": 0.7, "clip_low": 0.1}
        for name, correction in product(("grpo", "dapo", "gspo"), ("none", "mask"))
    ),
    {"surrogate": "cispo", "clip_high": 1.1, "loss": "token"},
]


@pytest.mark.parametrize("given", CASES, ids=lambda given: " ".join(map(str, given.values())))
def test_the_loss_and_its_gradient_are_the_papers(given: dict[str, Any]) -> None:
    for seed in range(3):
        own, (model, inputs, labels) = section(**given), drawn(seed)
        if not own.beta:
            del inputs[policy.REFERENCE]
        scored = PolicyGradient(own).score(model, dict(inputs), labels)
        scored.loss.backward()
        found, model.table.grad = model.table.grad, None
        exact, count = plain_policy_loss(
            own, model, inputs | {policy.REFERENCE: inputs.get(policy.REFERENCE, inputs[policy.OLD])}, labels
        )
        exact.backward()
        assert float(scored.loss.detach()) == pytest.approx(float(exact.detach()), rel=1e-6, abs=1e-9)
        assert found is not None and model.table.grad is not None
        torch.testing.assert_close(found, model.table.grad, rtol=1e-6, atol=1e-8)
        assert int(counts_of((labels != -100).sum(1), own).sum()) == count


REWARDS = torch.tensor([[1.0, 0.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0], [1.0, math.nan, 0.0, math.nan]]).double()


def test_advantages_are_of_the_own_group_and_of_what_has_a_reward() -> None:
    centred = torch.tensor([[0.0, -1.0, -1.0, 2.0], [0.0] * 4, [0.5, 0.0, -0.5, 0.0]]).double()
    torch.testing.assert_close(advantages(REWARDS, "group_mean"), centred)
    std = torch.tensor([[2.0**0.5], [0.0], [0.5**0.5]]).double()
    torch.testing.assert_close(advantages(REWARDS, "group_std"), centred / (std + policy.EPS))
    rloo = advantages(REWARDS, "rloo")
    assert rloo[0].tolist() == pytest.approx([1 - 1.0, 0 - 4 / 3, 0 - 4 / 3, 3 - 1 / 3])
    assert rloo[2].tolist() == pytest.approx([1.0, 0.0, -1.0, 0.0])


def test_a_group_of_equal_rewards_has_no_advantage_at_all() -> None:
    for size in (3, 6, 7, 12):
        assert not advantages(torch.full((1, size), 0.7).double(), "group_std").any()


def test_an_answer_alone_in_its_group_learns_nothing() -> None:
    alone = torch.tensor([[5.0, math.nan], [math.nan, math.nan]]).double()
    for kind in ("group_std", "group_mean", "rloo"):
        assert advantages(alone, kind).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_an_evaluation_is_minus_the_reward() -> None:
    model, inputs, labels = drawn(0)
    del inputs[policy.OLD]
    labels[0] = -100  # a row of padding
    scored = PolicyGradient(section()).score(model, inputs, labels)
    assert float(scored.loss) == pytest.approx(-float(inputs[policy.REWARD][1:].sum()))
    metrics = PolicyGradient(section()).metrics([float(value) for value in scored.sums], 5)  # type: ignore[union-attr]
    assert metrics["reward/mean"] == pytest.approx(float(inputs[policy.REWARD][1:].mean()))
    assert metrics["length"] == pytest.approx(sum(range(2, 7)) / 5) and metrics["truncated"] == 0


def test_temperature_is_in_log_probs_gradients_and_entropy() -> None:
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([1, -100, 3, 6])
    exact = (logits / 0.6).log_softmax(-1)
    found = token_log_probs(logits, targets, temperature=0.6)
    picked = exact.gather(1, targets.clamp(min=0)[:, None])[:, 0] * (targets != -100)
    torch.testing.assert_close(found, picked)
    mine, theirs = (
        torch.autograd.grad(values.square().sum(), logits, retain_graph=True)[0] for values in (found, picked)
    )
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(entropies(logits, temperature=0.6), -(exact.exp() * exact).sum(-1))
