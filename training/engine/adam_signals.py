"""Signals in Adam's averages about the next steps, by module (healthy ranges: docs/early-warnings.md).

RMS_t of g / sqrt(v), with v corrected and including g, is about 1, at most 1 / sqrt(1 - beta2) (Wortsman et al. 2023,
section 3.4). The signal's share of a gradient (Kingma and Ba 2015, section 2.1): for gradients mu + noise of variance
s^2, independent from step to step, E m^2 = mu^2 + c s^2 and E v = mu^2 + s^2 of the corrected averages, with c = (1 -
beta1) (1 + beta1^t) / ((1 + beta1) (1 - beta1^t)), so that mu^2 / (mu^2 + s^2) = (m^2 / v - c) / (1 - c).
"""

from collections.abc import Sequence

import torch

from config.optimizers import AVERAGES, COUNT
from precision.sampling import sampled
from training.engine.engine import Engine
from training.engine.tensors import Shard

COLUMNS = ("surprise", "first", "second", "averaged", "updates")
"""Columns of `adam_sums`: sums of g^2 / v, m^2 and v, the number of values, and of updates that made them."""


def adam_sums(engine: Engine, shard: Shard, gradient: torch.Tensor) -> torch.Tensor | None:
    """(5,) float64, COLUMNS of this rank's part of a parameter after an update, estimated from a sample; None without
    two averages. gradient: its `sampled` values as the update used them, FP32, unscaled and clipped."""
    state = engine.deepspeed.basic_optimizer.state.get(shard.flat, {})
    if not all(torch.is_tensor(state.get(key)) for key in AVERAGES) or COUNT not in state:
        return None
    group = engine.deepspeed.basic_optimizer.param_groups[0]  # all groups share these settings
    beta1, beta2 = group["betas"]
    first, second = (sampled(shard.of(state[key])) for key in AVERAGES)
    updates = torch.as_tensor(state[COUNT], dtype=torch.float64, device=first.device)
    seen1, seen2 = 1 - beta1**updates, 1 - beta2**updates
    surprise = gradient.to(first.device).square() / (second / seen2.float()).clamp(min=group["eps"] ** 2)
    sums = torch.stack([values.sum(dtype=torch.float64) for values in (surprise, first.square(), second)])
    whole = sums / torch.stack([torch.ones_like(seen1), seen1**2, seen2]) * (shard.length / len(first))
    return torch.cat([whole, torch.full_like(whole[:1], shard.length), updates.view(1)])


def adam_figures(engine: Engine, sums: Sequence[float]) -> dict[str, float]:
    """`rms`, and `signal` once the first average has seen enough gradients; empty without averages. sums: `COLUMNS`,
    all but `updates` summed over ranks and a module's parameters."""
    surprise, first, second, averaged, updates = sums
    if not averaged:
        return {}
    figures, beta1 = {"rms": (surprise / averaged) ** 0.5}, engine.deepspeed.basic_optimizer.param_groups[0]["betas"][0]
    if updates * (1 - beta1) > 1 and second > 0:
        kept = beta1**updates
        noise = (1 - beta1) * (1 + kept) / ((1 + beta1) * (1 - kept))
        figures["signal"] = (first / second - noise) / (1 - noise)
    return figures
