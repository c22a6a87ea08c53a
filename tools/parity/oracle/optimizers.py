"""Independent implementations of the update rules, in FP64.

AdamW and SGD are torch's. The others follow their papers, take nothing from training/engine/optimizers, and use the
other form of a rule that has two: averages that start at zero with corrected betas, not corrected averages, and Muon's
iteration on singular values, not on matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from config.schema import OptimizerSection
from training.corruption.settings import decay_and_factor, hidden_matrices

Direction = Callable[[nn.Parameter, dict[str, Any], dict[str, Any]], torch.Tensor]
"""(parameter with its gradient, its state, its group) -> what the learning rate multiplies, decay included."""


def optimizer_of(model: Any, section: OptimizerSection) -> torch.optim.Optimizer:
    """The optimizer of a model's trained parameters; `factor` of a group multiplies the scheduled rate."""
    matrices = hidden_matrices(model, section)
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, (decay, factor) in decay_and_factor(model, section).items():
        groups.setdefault((decay, factor, name in matrices), []).append(model.get_parameter(name))
    listed = [
        {"params": found, "weight_decay": decay, "factor": factor, "matrix": matrix}
        for (decay, factor, matrix), found in groups.items()
    ]
    if section.name == "adamw":
        return torch.optim.AdamW(listed, lr=0.0, betas=section.betas, eps=section.eps, foreach=False)
    if section.name == "sgd":
        momentum = 0.9 if section.momentum is None else section.momentum
        return torch.optim.SGD(listed, lr=0.0, momentum=momentum, foreach=False)
    rule: Direction = {"lion": _lion, "lamb": _lamb, "stable_adamw": _stable_adamw, "muon": _muon}[section.name]
    momentum = 0.95 if section.momentum is None else section.momentum
    return _Written(listed, rule, {"betas": section.betas, "eps": section.eps, "momentum": momentum})


class _Written(torch.optim.Optimizer):
    """w <- w - lr direction(w)."""

    def __init__(self, groups: list[dict[str, Any]], direction: Direction, settings: dict[str, Any]) -> None:
        super().__init__(groups, {"lr": 0.0, **settings})
        self._direction = direction

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["t"] = state.get("t", 0) + 1
                    parameter -= group["lr"] * self._direction(parameter, state, group)


def _average(state: dict[str, Any], name: str, value: torch.Tensor, share: float) -> torch.Tensor:
    """Mix `share` of `value` into the average `name`, which starts at zero, and return it."""
    state[name] = found = (1 - share) * state.get(name, torch.zeros_like(value)) + share * value
    return found


def _adam(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Both averages; weight (1 - b) / (1 - b^t) for the newest replaces correction (Wortsman et al. 2023, alg. 2)."""
    gradient, t = parameter.grad, state["t"]
    assert gradient is not None
    first, second = ((1 - beta) / (1 - beta**t) for beta in group["betas"])
    return _average(state, "first", gradient, first), _average(state, "second", gradient**2, second)


def _lion(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    """Chen et al. 2023, Algorithm 2."""
    (mix, keep), gradient = group["betas"], parameter.grad
    assert gradient is not None
    before = state.get("average", torch.zeros_like(gradient))
    _average(state, "average", gradient, 1 - keep)
    return torch.sign(mix * before + (1 - mix) * gradient) + group["weight_decay"] * parameter


def _lamb(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    """You et al. 2020, Algorithm 2, phi the identity; with a norm of zero the direction keeps its length."""
    first, second = _adam(parameter, state, group)
    direction = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * parameter
    length, own = float(direction.norm()), float(parameter.norm())
    return direction * (own / length) if own and length else direction


def _stable_adamw(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    """Wortsman et al. 2023, Algorithm 2, AdamW with update clipping; decay and direction at the same clipped rate."""
    first, second = _adam(parameter, state, group)
    assert parameter.grad is not None
    surprise = float((parameter.grad**2 / torch.clamp(second, min=group["eps"] ** 2)).mean()) ** 0.5
    return (first / (second.sqrt() + group["eps"]) + group["weight_decay"] * parameter) / max(1.0, surprise)


def _muon(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    """Liu et al. 2025, equation 4, with Nesterov's momentum, for a hidden matrix; AdamW for the rest.

    The quintic iteration of Jordan et al. 2024 keeps singular vectors, and maps each singular value s, divided by the
    root sum of squares of all, to 3.4445 s - 4.775 s^3 + 2.0315 s^5, five times.
    """
    decay = group["weight_decay"] * parameter
    if not group["matrix"]:
        first, second = _adam(parameter, state, group)
        return first / (second.sqrt() + group["eps"]) + decay
    gradient, momentum = parameter.grad, group["momentum"]
    assert gradient is not None
    average = _average(state, "average", gradient, 1 - momentum)
    left, values, right = torch.linalg.svd(momentum * average + (1 - momentum) * gradient, full_matrices=False)
    values = values / (values.norm(dim=-1, keepdim=True) + 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    return 0.2 * max(parameter.shape[-2:]) ** 0.5 * (left * values[..., None, :]) @ right + decay
