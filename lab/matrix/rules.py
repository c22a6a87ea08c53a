"""The rules of optimizers in plain torch and FP64, on whole parameters: what cells with one of them are compared with.

Written from the papers, with nothing of the engine's files: Muon's matrix by its singular values, not by products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from config.optimizers import settings_of
from config.schema import OptimizerSection
from modeling.parameter_groups import parameter_groups

State = dict[str, Any]
"""What a rule keeps of one parameter: `t`, the number of the step, and its averages."""
Given = dict[str, Any]
"""`lr` and `weight_decay` of this step and parameter, its `matrix`, and the settings of the config."""
Rule = Callable[[torch.Tensor, torch.Tensor, State, Given], torch.Tensor]
"""(weights, gradient, state, given), all FP64 -> what is added to the weights."""


class PlainOptimizer(torch.optim.Optimizer):
    """The optimizer that a config names, for a model in FP64."""

    def __init__(self, model: torch.nn.Module, section: OptimizerSection) -> None:
        super().__init__(parameter_groups(model, section), {"lr": section.learning_rate, **settings_of(section)})
        self._rule = RULES[section.name]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter in place."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["t"] = state.get("t", 0) + 1
                parameter += self._rule(parameter, parameter.grad, state, group)


def _average(state: State, key: str, value: torch.Tensor, beta: float) -> torch.Tensor:
    """beta x the average so far, which starts at zero, and (1 - beta) x the value."""
    state[key] = beta * state.get(key, torch.zeros_like(value)) + (1 - beta) * value
    found: torch.Tensor = state[key]
    return found


def _moments(gradient: torch.Tensor, state: State, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """Kingma and Ba 2015, Algorithm 1: both averages, corrected."""
    (beta1, beta2), t = given["betas"], state["t"]
    first = _average(state, "m", gradient, beta1) / (1 - beta1**t)
    return first, _average(state, "v", gradient**2, beta2) / (1 - beta2**t)


def _adamw(weights: torch.Tensor, gradient: torch.Tensor, state: State, given: Given) -> torch.Tensor:
    """Loshchilov and Hutter 2019, Algorithm 2."""
    first, second = _moments(gradient, state, given)
    return -given["lr"] * (first / (second**0.5 + given["eps"]) + given["weight_decay"] * weights)


def _stable_adamw(weights: torch.Tensor, gradient: torch.Tensor, state: State, given: Given) -> torch.Tensor:
    """Wortsman et al. 2023, Algorithm 2."""
    change = _adamw(weights, gradient, state, given)
    second = state["v"] / (1 - given["betas"][1] ** state["t"])
    surprise = float((gradient**2 / second.clamp(min=given["eps"] ** 2)).mean() ** 0.5)
    return change / max(1.0, surprise)


def _lamb(weights: torch.Tensor, gradient: torch.Tensor, state: State, given: Given) -> torch.Tensor:
    """You et al. 2020, Algorithm 2, its function of the norm being the identity."""
    change = _adamw(weights, gradient, state, given)
    length, moved = float(weights.norm()), float(change.norm()) / given["lr"]
    return change * (length / moved if length and moved else 1.0)


def _lion(weights: torch.Tensor, gradient: torch.Tensor, state: State, given: Given) -> torch.Tensor:
    """Chen et al. 2023, Algorithm 2."""
    mix, decay = given["betas"]
    direction = torch.sign(mix * state.get("m", torch.zeros_like(gradient)) + (1 - mix) * gradient)
    _average(state, "m", gradient, decay)
    return -given["lr"] * (direction + given["weight_decay"] * weights)


def _muon(weights: torch.Tensor, gradient: torch.Tensor, state: State, given: Given) -> torch.Tensor:
    """Jordan et al. 2024, with the sizes of Liu et al. 2025, equation 4. Fused experts are a matrix each."""
    if not given["matrix"]:
        return _adamw(weights, gradient, state, given)
    momentum = given["momentum"]
    average = _average(state, "m", gradient, momentum)
    left, values, right = torch.linalg.svd(momentum * average + (1 - momentum) * gradient, full_matrices=False)
    values = values / (values.norm(dim=-1, keepdim=True) + 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    step = left * values[..., None, :] @ right * 0.2 * max(weights.shape[-2:]) ** 0.5
    return -given["lr"] * (step + given["weight_decay"] * weights)


def _sgd(weights: torch.Tensor, gradient: torch.Tensor, state: State, given: Given) -> torch.Tensor:
    """Polyak 1964, the decay being part of the gradient, as in `torch.optim.SGD`."""
    pulled = gradient + given["weight_decay"] * weights
    state["m"] = given["momentum"] * state["m"] + pulled if "m" in state else pulled
    velocity: torch.Tensor = state["m"]
    return -given["lr"] * velocity


RULES: dict[str, Rule] = {
    "adamw": _adamw,
    "stable_adamw": _stable_adamw,
    "lamb": _lamb,
    "lion": _lion,
    "muon": _muon,
    "sgd": _sgd,
}
"""optimizer.name to its rule."""
