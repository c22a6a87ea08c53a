"""Loss scales, restored state, random numbers and copies that are not what they should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from config.optimizers import AVERAGES
from data.batches import loader
from lab.detection.plants.site import (
    LINEAR,
    Counter,
    EnginePlant,
    Site,
    around,
    change_gradients,
    instead_of,
    on_bad_rank,
    on_engine,
)
from training import loss_scaler, progress, session
from training.checkpoint import checkpoints
from training.engine import Engine
from training.engine.masters import local_masters


@instead_of("update_scale", loss_scaler.LossScaler)
def never_grows(right: Callable[..., None], self: Any, overflow: bool) -> None:
    before = self.policy.state_dict()
    right(self, overflow)
    if self._reason == "growth":
        self.policy.load_state_dict(before)
        self._reason = None


def clamped_overflow(engine: Engine, size: float) -> None:
    """A gradient that does not fit into the format becomes its largest number, and no step is skipped."""
    change_gradients(engine, lambda gradient: gradient.nan_to_num().clamp(-3e4, 3e4))


@instead_of("after", progress.Progress)
def skipped_step_moves_the_schedule(right: Callable[..., Any], self: Any, *, tokens: int, applied: bool) -> Any:
    return right(self, tokens=tokens, applied=True)


def skipped_step_counts_for_adam(engine: Engine, size: float) -> None:
    optimizer: Any = engine.deepspeed.basic_optimizer
    waiting = 0

    def step(right: Callable[..., Any], *args: Any, **options: Any) -> Any:
        nonlocal waiting
        update = right(*args, **options)
        waiting += not update.applied
        states = [state for state in optimizer.state.values() if "step" in state]
        if states and waiting:
            for state in states:
                state["step"] += waiting
            waiting = 0
        return update

    around(engine, "step", step)


def kept_weights(module: str, when: Callable[[int], bool] = lambda step: True) -> EnginePlant:
    """The weights of a module stay what they were before the steps of which `when` is true."""

    def plant(engine: Engine, size: float) -> None:
        parameters: Any = list(engine.model.get_submodule(module).parameters())
        now = Counter(engine)

        def step(right: Callable[..., Any], *args: Any, **options: Any) -> Any:
            before = [_held(parameter).clone() for parameter in parameters]
            update = right(*args, **options)
            if when(now.step):
                for parameter, old in zip(parameters, before, strict=True):
                    _held(parameter).copy_(old)
            return update

        around(engine, "step", step)

    return plant


def _held(parameter: Any) -> torch.Tensor:
    held: torch.Tensor = parameter.ds_tensor.data if hasattr(parameter, "ds_tensor") else parameter.data
    return held


stale_copy_on_one_rank = on_bad_rank(on_engine(kept_weights(LINEAR)))
"""This rank's weights of one matrix stay what they were at the start."""


def after_load(engine: Engine, change: Callable[[], None]) -> None:
    def load(right: Callable[..., Any], *args: Any, **options: Any) -> None:
        right(*args, **options)
        with torch.no_grad():
            change()

    around(engine, "load", load)


def masters_rounded_at_load(engine: Engine, size: float) -> None:
    def change() -> None:
        for master in local_masters(engine.deepspeed.optimizer):
            master.copy_(master.bfloat16())

    after_load(engine, change)


def at_load(change: Callable[[dict[str, Any], float], Any]) -> EnginePlant:
    """Change the optimizer's state of every master after a load, by the size of the defect."""

    def plant(engine: Engine, size: float) -> None:
        def change_all() -> None:
            for state in engine.deepspeed.basic_optimizer.state.values():
                change(state, size)

        after_load(engine, change_all)

    return plant


moments_lost_at_load = at_load(lambda state, size: [state[key].zero_() for key in AVERAGES])
count_lost_at_load = at_load(lambda state, size: state["step"].zero_())


def scale_lost_at_load(engine: Engine, size: float) -> None:
    around(engine, "install_scaler", lambda right, state: right(None))


@instead_of("restore", loader.Batches)
def batch_used_twice(right: Callable[..., None], self: Any, position: int) -> None:
    right(self, max(position - 1, 0))


@instead_of("load_generators", checkpoints)
def random_numbers_not_restored(*args: Any, **options: Any) -> None:
    torch.manual_seed(12345)


def same_random_numbers_on_all_ranks(site: Site) -> None:
    right = session.seed_everything
    site.patch(session, "seed_everything", lambda seed: right(seed - site.rank))
