"""The learning rate as a pure function of applied optimizer steps: skipped steps do not advance it."""

import math

from config.schema import Config, ScheduleSection


def learning_rate(schedule: ScheduleSection, *, peak: float, applied: int, total: int) -> float:
    """Learning rate of the update that follows `applied` applied steps, of `total` planned ones.

    Warm-up rises linearly to the peak at its last step, number W - 1 from 0. Step W runs at the peak too: there the
    decay starts, and the last planned step, T - 1, runs at `final_ratio` x peak. So no step runs at 0. transformers'
    schedulers have this rate at step n + 1 in the warm-up, and at step n with `num_training_steps` = T - 1 after it.

    cosine: half a period (Loshchilov and Hutter 2017, "SGDR", eq. 5, one cycle). linear: a straight line. wsd:
    constant, then a straight line over the last `decay_fraction` of `total` (Hu et al. 2024, "MiniCPM", section 4).
    constant: the peak throughout.
    """
    if applied < schedule.warmup_steps:
        return peak * (applied + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    last = max(total - 1, 1)
    start = schedule.warmup_steps
    if schedule.name == "wsd":
        start = max(start, last - max(round(schedule.decay_fraction * total), 1))
    progress = min(max(applied - start, 0) / max(last - start, 1), 1.0)
    shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1.0 - progress
    return peak * (schedule.final_ratio + (1.0 - schedule.final_ratio) * shape)


def scheduled_rate(config: Config, applied: int) -> float:
    """The run's learning rate for the update that follows `applied` applied steps."""
    peak, total = config.optimizer.learning_rate, config.scheduled_steps
    return learning_rate(config.schedule, peak=peak, applied=applied, total=total)
