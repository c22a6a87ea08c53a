"""Code run inside the process of test_loss_scaler.py (DeepSpeed's scaler asks for a rank)."""

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from config.schema import LossScaleSection
from training.checkpoint.reader import PLAIN
from training.distributed import World
from training.loss_scaler import LossScaler


def _random_case(draw: random.Random, **keys: Any) -> tuple[LossScaleSection, list[bool]]:
    section = LossScaleSection(
        initial=2.0 ** draw.randint(0, 6),
        window=draw.randint(1, 5),
        hysteresis=draw.randint(1, 3),
        minimum=1.0,
        escalate_within=20,
        **keys,
    )
    rate = draw.random()
    return section, [draw.random() < rate for _ in range(draw.randint(1, 60))]


def traces(world: World, *, examples: int) -> list[tuple[list, list]]:
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
            ours.apply_change()
            upstream.update_scale(overflow)
            mine.append((ours.cur_scale, ours.policy.hysteresis))
            theirs.append((upstream.cur_scale, upstream.cur_hysteresis))
        found.append((mine, theirs))
    return found


def minimum_raises(world: World, *, examples: int) -> list[tuple[int | None, int | None]]:
    """Step at which we first report the minimum, and step at which upstream raises its bare Exception."""
    draw, found = random.Random(2), []
    for _ in range(examples):
        section, pattern = _random_case(draw)
        ours = LossScaler(section)
        upstream = DynamicLossScaler(section.initial, section.window, section.minimum, section.hysteresis, False)
        mine = theirs = None
        for step, overflow in enumerate(pattern):
            ours.update_scale(overflow)
            ours.apply_change()
            mine = step if mine is None and ours.policy.at_minimum else mine
            if theirs is None:
                try:
                    upstream.update_scale(overflow)
                except Exception as error:
                    assert "already at minimum" in str(error)
                    theirs = step
        found.append((mine, theirs))
    return found


def _through_checkpoint(scaler: LossScaler) -> LossScaler:
    """As ZeRO's files carry it: pickled by DeepSpeed, read back by the reader that runs no code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optim_states.pt"
        torch.save({"loss_scaler": scaler}, path)
        return PLAIN.read(path)["loss_scaler"]


def resumed_traces(world: World, *, examples: int, policy: str) -> list[tuple[list, list]]:
    """(unbroken trace, trace of a scaler whose state was moved to another one at a random step)."""
    draw, found = random.Random(1), []
    for _ in range(examples):
        section, pattern = _random_case(draw, policy=policy)
        cut = draw.randrange(len(pattern))
        unbroken, broken = LossScaler(section), LossScaler(section)
        whole, pieces = [], []
        for index, overflow in enumerate(pattern):
            if index == cut:
                broken = _through_checkpoint(broken)
            for scaler, trace in ((unbroken, whole), (broken, pieces)):
                scaler.update_scale(overflow)
                change = scaler.apply_change()
                trace.append((scaler.state_dict(), scaler.cur_scale, scaler.policy.at_minimum, change))
        found.append((whole, pieces))
    return found


def story(world: World) -> list[tuple[Any, ...]]:
    """(scale during the rest of the step, scale after it, reason, overflow at the minimum) of a short run."""
    scaler = LossScaler(LossScaleSection(initial=8.0, window=2, hysteresis=2, minimum=4.0))
    rows = []
    for overflow in (False, True, True, True, False, False, False):
        scaler.update_scale(overflow)
        during = scaler.cur_scale
        change = scaler.apply_change()
        rows.append((during, scaler.cur_scale, change.reason if change else None, scaler.policy.at_minimum))
    return rows


def discarded(world: World, *, policy: str) -> list[tuple[dict, dict, Any]]:
    """(state before, state after, change) of discarded steps spread among others, which are not affected."""
    draw = random.Random(3)
    section, pattern = _random_case(draw, policy=policy)
    with_guard, without = LossScaler(section), LossScaler(section)
    rows = []
    for overflow in pattern:
        before, scale = with_guard.state_dict(), with_guard.cur_scale
        with with_guard.ignoring_overflow():
            with_guard.update_scale(True)
        change = with_guard.apply_change()
        assert with_guard.cur_scale == scale
        rows.append((before, with_guard.state_dict(), change))
        for scaler in (with_guard, without):
            scaler.update_scale(overflow)
            scaler.apply_change()
        assert with_guard.state_dict() == without.state_dict()
    return rows


def discarded_but_applied(world: World) -> str:
    """The complaint when a step that was to be discarded is applied; afterwards the scaler works again."""
    scaler = LossScaler(LossScaleSection(initial=8.0, hysteresis=1))
    message = ""
    try:
        with scaler.ignoring_overflow():
            scaler.update_scale(False)
    except RuntimeError as error:
        message = str(error)
    scaler.update_scale(True)
    scaler.apply_change()
    assert scaler.cur_scale == 4.0
    return message
