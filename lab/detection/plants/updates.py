"""Optimizer rules that are not AdamW's: one implementation in FP32, right but for what a defect changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lab.detection.plants.site import Site, around
from training.engine import Engine


@dataclass
class Given:
    """Values that an engine's step knows and its optimizer does not."""

    norm: float = 0.0
    scale: float = 1.0
    next_scale: float = 1.0
    """The loss scale of the next step."""


@dataclass(frozen=True)
class Rule:
    """AdamW with some of it changed."""

    eps: float = 1.0
    """[factor]"""
    lr: float = 1.0
    """[factor]"""
    beta1: float = 0.0
    """Added."""
    beta2: float = 0.0
    ahead: int = 0
    """[steps] Of the bias correction."""
    corrected: bool = True
    eps_inside: bool = False
    coupled: bool = False
    decay: Callable[[float], float] = float
    """Maps the group's weight decay to the one that is applied."""
    decay_times_lr: bool = True
    first: torch.dtype = torch.float32
    second: torch.dtype = torch.float32
    masters: torch.dtype = torch.float32
    """Dtype of the masters of parameters that do not decay."""
    deaf: float | None = None
    """Learning rate of parameters that do not decay."""
    stale_first: bool = False
    """Go by the first moment of the step before."""
    gradient: Callable[[list[torch.Tensor], Given, float], float] | None = None
    """[factor] On the gradients of a group, from them, the step and the config's clipping."""


def _clip(given: Given, clipping: float) -> float:
    return min(1.0, clipping / (given.norm + 1e-6)) if clipping else 1.0


def clipped_by_own_norm(gradients: list[torch.Tensor], given: Given, clipping: float) -> float:
    """Clip by the norm of this rank's part of the group."""
    right = _clip(given, clipping)
    norm = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5 / right
    return min(1.0, clipping / (norm + 1e-6)) / right


def clipped_before_unscaling(gradients: list[torch.Tensor], given: Given, clipping: float) -> float:
    """The norm is still the scaled gradient's."""
    return min(1.0, clipping / (given.norm * given.scale)) / _clip(given, clipping)


def unscaled_by_the_next_scale(gradients: list[torch.Tensor], given: Given, clipping: float) -> float:
    return given.scale / given.next_scale


def rule(make: Callable[[float], Rule]) -> Callable[[Site], None]:
    """An engine whose optimizer follows this rule. make: from the defect's size."""
    return lambda site: site.when_built(lambda engine: _follow(engine, make(site.size)))


def _follow(engine: Engine, changed: Rule) -> None:
    optimizer: Any = engine.deepspeed.basic_optimizer
    given = Given()

    def step(right: Callable[..., Any], health: Any, *args: Any, **options: Any) -> Any:
        given.norm, given.scale = health.grad_norm, engine.loss_scale
        return right(health, *args, **options)

    @torch.no_grad()
    def update(closure: Any = None) -> None:
        scaler = engine._scaler
        given.next_scale = float(scaler.policy.scale) if scaler is not None else 1.0
        for group in optimizer.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad.float() for parameter in held]
            factor = changed.gradient(gradients, given, engine.clipping) if changed.gradient else 1.0
            for parameter, gradient in zip(held, gradients, strict=True):
                _update(parameter, gradient * factor, optimizer.state[parameter], group, changed)

    around(engine, "step", step)
    optimizer.step = update


def _update(master: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: Any, changed: Rule) -> None:
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
    state["step"] += 1
    decays, first, second = group["weight_decay"] > 0, state["exp_avg"], state["exp_avg_sq"]
    lr = group["lr"] * changed.lr if decays or changed.deaf is None else changed.deaf
    beta1, beta2 = group["betas"][0] + changed.beta1, group["betas"][1] + changed.beta2
    decay, eps, count = changed.decay(group["weight_decay"]), group["eps"] * changed.eps, float(state["step"])
    if changed.coupled:
        gradient = gradient + decay * master
    else:
        master.mul_(1 - (lr if changed.decay_times_lr else 1e-3) * decay)
    followed = first.clone() if changed.stale_first else first
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    for average, dtype in ((first, changed.first), (second, changed.second)):
        average.copy_(average.to(dtype))
    own = count + changed.ahead
    of_first, of_second = (1 - beta1**own, 1 - beta2**own) if changed.corrected else (1.0, 1.0)
    root = (second / of_second + eps).sqrt() if changed.eps_inside else (second / of_second).sqrt() + eps
    master.sub_(lr / of_first * followed / root)
    if not decays:
        master.copy_(master.to(changed.masters))
