"""Each policy-gradient loss equals the papers' formulas, answer by answer in FP64, and so do its gradients."""

import math
from itertools import product
from typing import Any

import pytest
import torch

from config.schema import GrpoSection
from config.task import ALGORITHMS, DECIDED
from modeling.log_probs import entropies, token_log_probs
from modeling.objectives import policy
from modeling.objectives.policy import PolicyGradient, advantages, counted

VOCABULARY, LENGTH, ANSWERS = 11, 9, 6


def section(**given: Any) -> GrpoSection:
    decided = dict(zip(DECIDED, ALGORITHMS[given.get("algorithm", "grpo")], strict=True))
    return GrpoSection(**(decided | {"max_new_tokens": 7} | given))


class Model(torch.nn.Module):
    """A table of logits: enough to have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        class Output:
            logits = self.table[input_ids]

        return Output


def drawn(seed: int) -> tuple[Model, dict[str, torch.Tensor], torch.Tensor]:
    """A model, and answers of uneven length, one of them with its end as padding's token."""
    torch.manual_seed(seed)
    model, ids = Model(), torch.randint(VOCABULARY, (ANSWERS, LENGTH))
    labels = torch.full_like(ids, -100)
    for row in range(ANSWERS):
        labels[row, 1 : 2 + row] = torch.randint(VOCABULARY, (1 + row,))
    labels[2, 3] = 0
    inputs = {"input_ids": ids, policy.ADVANTAGE: torch.randn(ANSWERS), policy.REWARD: torch.rand(ANSWERS)}
    inputs[policy.ENDED] = torch.ones(ANSWERS)
    with torch.no_grad():
        now = model.table[ids].log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    for name, spread in ((policy.OLD, 0.3), (policy.SAMPLER, 0.9), (policy.REFERENCE, 0.5)):
        inputs[name] = now + spread * torch.randn(ANSWERS, LENGTH)
    return model, inputs, labels


def plain(given: GrpoSection, model: Model, inputs: dict[str, Any], labels: torch.Tensor) -> tuple[Any, int]:
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
        exact, count = plain(
            own, model, inputs | {policy.REFERENCE: inputs.get(policy.REFERENCE, inputs[policy.OLD])}, labels
        )
        exact.backward()
        assert float(scored.loss.detach()) == pytest.approx(float(exact.detach()), rel=1e-6, abs=1e-9)
        assert found is not None and model.table.grad is not None
        torch.testing.assert_close(found, model.table.grad, rtol=1e-6, atol=1e-8)
        assert int(counted((labels != -100).sum(1), own).sum()) == count


REWARDS = torch.tensor([[1.0, 0.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0], [1.0, math.nan, 0.0, math.nan]]).double()


def test_advantages_are_of_the_own_group_and_of_what_has_a_reward() -> None:
    centred = torch.tensor([[0.0, -1.0, -1.0, 2.0], [0.0] * 4, [0.5, 0.0, -0.5, 0.0]]).double()
    torch.testing.assert_close(advantages(REWARDS, "group_mean"), centred)
    std = torch.tensor([[2.0**0.5], [0.0], [0.5**0.5]]).double()
    torch.testing.assert_close(advantages(REWARDS, "group_std"), centred / (std + policy.EPS))
    rloo = advantages(REWARDS, "rloo")
    assert rloo[0].tolist() == pytest.approx([1 - 1.0, 0 - 4 / 3, 0 - 4 / 3, 3 - 1 / 3])
    assert rloo[2].tolist() == pytest.approx([1.0, 0.0, -1.0, 0.0])


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
    found = token_log_probs(logits, targets, ignored=-100, temperature=0.6)
    picked = exact.gather(1, targets.clamp(min=0)[:, None])[:, 0] * (targets != -100)
    torch.testing.assert_close(found, picked)
    mine, theirs = (
        torch.autograd.grad(values.square().sum(), logits, retain_graph=True)[0] for values in (found, picked)
    )
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(entropies(logits, temperature=0.6), -(exact.exp() * exact).sum(-1))
