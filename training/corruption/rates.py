"""Learning rates computed by torch's schedules, as a reference for training/schedule.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from config.schema import ScheduleSection

SAME_RATE = 1e-9
"""Relative difference up to which a learning rate equals the schedule's: both use FP64, in a different order."""


def schedule(section: ScheduleSection, *, peak: float, total: int) -> Callable[[int], float]:
    """Maps the number of applied updates, of `total` planned, to the next one's learning rate.

    Torch's schedules start with the first update; docs/numerics.md says where ours start and end.
    """
    warmup, last = section.warmup_steps, max(total - 1, 1)
    rising = _factor(LinearLR, start_factor=1 / max(warmup, 1), total_iters=max(warmup - 1, 1))
    start = warmup
    if section.name == "wsd":
        start = max(warmup, last - max(round(section.decay_fraction * total), 1))
    length = last - start
    if section.name == "constant" or last <= warmup:  # the decay starts with the last step, or never
        falling: Callable[[int], float] = lambda step: 1.0  # noqa: E731
    elif section.name == "cosine":
        falling = _factor(CosineAnnealingLR, T_max=length, eta_min=section.final_ratio)
    else:
        falling = _factor(LinearLR, start_factor=1.0, end_factor=section.final_ratio, total_iters=length)

    def rate(applied: int) -> float:
        if applied < warmup:
            return peak * rising(applied)
        return peak * falling(min(max(applied - start, 0), length))

    return rate


def _factor(kind: Any, **options: Any) -> Callable[[int], float]:
    """Factor of the peak after a number of steps, by the schedule's closed form."""
    made = kind(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), **options)

    def factor(step: int) -> float:
        made.last_epoch = step
        return float(made._get_closed_form_lr()[0])

    return factor
