"""Gradients of experts are compared with those of the same choices, which rounding decides near a tie."""

import copy
import math

import torch

from tests.tools.parity.test_signature import VOCABULARY, cast, trained
from tools.parity.plain import Apart
from tools.parity.routing import Choices, choosing, differ

EXPERTS = "model.layers.1.mlp.experts.down_proj"


def gradient_of(model: torch.nn.Module, made: Choices, taken: Choices | None = None) -> torch.Tensor:
    tokens = torch.randint(VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(1))
    with choosing(model, made, taken):
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    gradient = model.get_parameter(EXPERTS).grad
    assert gradient is not None
    model.zero_grad()
    return gradient.clone()


def test_choices_near_a_tie_are_taken_over_and_wrong_ones_are_not() -> None:
    reference = trained("mixtral", "eager", 1)
    run = copy.deepcopy(reference)
    cast(run)
    expected: Choices = {}
    chosen: Choices = {}
    taken: Choices = {}
    own, mine = gradient_of(reference, expected), gradient_of(run, chosen)
    assert differ(chosen, expected) == 1.0 and differ(chosen, chosen) == 0.0
    same = gradient_of(reference, taken, chosen)
    assert all(
        torch.equal(one.indices, other.indices)
        for name in chosen
        for one, other in zip(taken[name], chosen[name], strict=True)
    )
    assert Apart([(mine, same)]).error < 0.5 * Apart([(mine, own)]).error
    [name, *_] = chosen
    worst = [choice._replace(indices=choice.given.argsort()[:, :2]) for choice in chosen[name]]
    assert math.isnan(differ(chosen | {name: worst}, expected))
    assert math.isnan(differ(chosen, {}))
