"""Learning rates computed by transformers' schedules, as a reference for training/schedule.py."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from config.schema import ScheduleSection


def schedule(section: ScheduleSection, *, peak: float, total: int) -> Callable[[int], float]:
    """Maps the number of applied updates, of `total` planned, to the next one's learning rate. transformers' schedules
    start at 0 and end one step after the last; docs/numerics.md aligns them with ours."""
    warmup, last = section.warmup_steps, max(total - 1, 1)
    rising = _factor(transformers.get_constant_schedule_with_warmup, warmup)
    ratio = section.final_ratio
    if section.name == "constant" or last <= warmup:  # the decay starts with the last step, or never
        falling = lambda step: 1.0  # noqa: E731
    elif section.name == "cosine":
        falling = _factor(
            transformers.get_cosine_with_min_lr_schedule_with_warmup, warmup, num_training_steps=last, min_lr_rate=ratio
        )
    elif section.name == "linear":
        line = _factor(transformers.get_linear_schedule_with_warmup, warmup, num_training_steps=last)
        falling = lambda step: ratio + (1.0 - ratio) * line(step)  # noqa: E731
    else:
        decay = max(round(section.decay_fraction * total), 1)
        start = max(warmup, last - decay)
        options = {"num_stable_steps": start - warmup, "num_decay_steps": last - start, "decay_type": "linear"}
        falling = _factor(transformers.get_wsd_schedule, warmup, min_lr_ratio=ratio, **options)
    return lambda applied: peak * (rising(applied + 1) if applied < warmup else falling(min(applied, last)))


def _factor(make: Callable[..., Any], warmup: int, **options: Any) -> Callable[[int], float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    found: Callable[[int], float] = make(optimizer, num_warmup_steps=warmup, **options).lr_lambdas[0]
    return found
