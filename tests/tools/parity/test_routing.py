"""Gradients are compared with those of the same choices, which rounding decides near a tie of experts or at a ReLU."""

import copy
import math

import pytest
import torch

from tests.tools.parity.test_signature import VOCABULARY, cast, trained
from tools.parity.plain import Apart
from tools.parity.routing import Choices, choosing, differ


def gradient_of(model: torch.nn.Module, name: str, made: Choices, taken: Choices | None = None) -> torch.Tensor:
    tokens = torch.randint(VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(1))
    with choosing(model, made, taken):
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    model.zero_grad()
    return gradient.clone()


@pytest.mark.parametrize(
    ("architecture", "parameter"),
    [("mixtral", "model.layers.1.mlp.experts.down_proj"), ("opt", "model.decoder.layers.1.fc1.weight")],
)
def test_choices_near_a_tie_are_taken_over_and_wrong_ones_are_not(architecture: str, parameter: str) -> None:
    reference = trained(architecture, "eager", 1)
    run = copy.deepcopy(reference)
    cast(run)
    expected: Choices = {}
    chosen: Choices = {}
    taken: Choices = {}
    own, mine = gradient_of(reference, parameter, expected), gradient_of(run, parameter, chosen)
    assert differ(chosen, expected) == 1.0 and differ(chosen, chosen) == 0.0
    same = gradient_of(reference, parameter, taken, chosen)
    assert all(
        torch.equal(one.indices, other.indices)
        for name in chosen
        for one, other in zip(taken[name], chosen[name], strict=True)
    )
    assert Apart([(mine, same)]).error < 0.5 * Apart([(mine, own)]).error
    assert math.isnan(differ(chosen, {}))
    if architecture == "opt":
        return
    [name, *_] = chosen
    worst = [choice._replace(indices=choice.given.argsort()[:, :2]) for choice in chosen[name]]
    assert math.isnan(differ(chosen | {name: worst}, expected))
