"""What runs inside the process of tests/training/test_loss_scaler.py (DeepSpeed's scaler asks for a rank)."""

from __future__ import annotations

import random
from typing import Any

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from config.schema import LossScaleSection
from training.distributed import Place
from training.loss_scaler import LossScaler


def _random_case(draw: random.Random) -> tuple[LossScaleSection, list[bool]]:
    section = LossScaleSection(
        initial=2.0 ** draw.randint(0, 6), window=draw.randint(1, 5), hysteresis=draw.randint(1, 3), minimum=1.0
    )
    rate = draw.random()
    return section, [draw.random() < rate for _ in range(draw.randint(1, 60))]


def traces(place: Place, *, examples: int) -> list[tuple[list, list]]:
    """(our trace, upstream's trace) of (scale, hysteresis) after each step, for random overflow patterns."""
    draw, found = random.Random(0), []
    for _ in range(examples):
        section, pattern = _random_case(draw)
        ours = LossScaler(section)
        upstream = DynamicLossScaler(
            init_scale=section.initial,
            scale_window=section.window,
            min_scale=section.minimum,
            delayed_shift=section.hysteresis,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=False,
        )
        mine, theirs = [], []
        for overflow in pattern:
            ours.update_scale(overflow)
            ours.settle()
            upstream.update_scale(overflow)
            mine.append((ours.cur_scale, ours.cur_hysteresis))
            theirs.append((upstream.cur_scale, upstream.cur_hysteresis))
        found.append((mine, theirs))
    return found


def resumed_traces(place: Place, *, examples: int) -> list[tuple[list, list]]:
    """(unbroken trace, trace with the state carried to a new scaler at a random step)."""
    draw, found = random.Random(1), []
    for _ in range(examples):
        section, pattern = _random_case(draw)
        cut = draw.randrange(len(pattern))
        unbroken, broken = LossScaler(section), LossScaler(section)
        whole, pieces = [], []
        for index, overflow in enumerate(pattern):
            if index == cut:
                state = broken.state_dict()
                broken = LossScaler(section)
                broken.load_state_dict(state)
            for scaler, trace in ((unbroken, whole), (broken, pieces)):
                scaler.update_scale(overflow)
                scaler.settle()
                trace.append(scaler.state_dict())
        found.append((whole, pieces))
    return found


def story(place: Place) -> list[tuple[Any, ...]]:
    """(scale during the rest of the step, scale after it, reason, overflow at the minimum) of a short run."""
    scaler = LossScaler(LossScaleSection(initial=8.0, window=2, hysteresis=2, minimum=4.0))
    rows = []
    for overflow in (False, True, True, True, False, False, False):
        scaler.update_scale(overflow)
        during = scaler.cur_scale
        change = scaler.settle()
        rows.append((during, scaler.cur_scale, change.reason if change else None, scaler.at_minimum))
    return rows
