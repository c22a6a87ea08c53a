"""One bit that flips on one rank, at one step: in what the rank holds, or in what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lab.detection.plants.site import MLP, Change, Counter, Plant, around, on_bad_rank, on_engine
from training.engine import Engine
from training.engine.flips import flip_bit, flipped
from training.engine.tensors import local_gradient, shard_of

AT = 8
"""The attempted step, which may be executed again: the bit flips in its first execution."""
HIT = f"{MLP}.down_proj"
"""At every ZeRO stage the bad rank holds some of it."""


def _parameter(engine: Engine) -> Any:
    return next(engine.model.get_submodule(HIT).parameters())


def _held(find: Callable[[Engine, Any], torch.Tensor], *, after: bool = False) -> Plant:
    """Flip a bit in the middle of what `find` finds before the passes of the step, or after them."""

    def plant(engine: Engine, size: float) -> None:
        done: list[int] = []

        def strike(step: int) -> None:
            if step == AT and not done:
                done.append(step)
                values = find(engine, _parameter(engine))
                flip_bit(values, values.numel() // 2, int(size))

        def forward_backward(right: Callable[..., Any], batch: Any, *, step: int, **options: Any) -> Any:
            if not after:
                strike(step)
            outcome = right(batch, step=step, **options)
            if after:
                strike(step)
            return outcome

        around(engine, "forward_backward", forward_backward)

    return on_bad_rank(on_engine(plant))


def _weight(engine: Engine, parameter: Any) -> torch.Tensor:
    whole = engine.stage < 3 or parameter.numel()
    held: torch.Tensor = parameter.data if whole else parameter.ds_tensor.data
    return held


def _shard(engine: Engine, parameter: Any) -> Any:
    shard = shard_of(engine, parameter)
    assert shard is not None, "this rank has none of it"
    return shard


def _reduced_gradient(engine: Engine, parameter: Any) -> torch.Tensor:
    """This rank's part after the reduction."""
    values = local_gradient(parameter, _shard(engine, parameter), engine.stage)
    assert values is not None
    return values


weight = _held(_weight)
master = _held(lambda engine, parameter: _shard(engine, parameter).tensors(engine)["master"])
first_moment = _held(lambda engine, parameter: _shard(engine, parameter).tensors(engine)["exp_avg"])
second_moment = _held(lambda engine, parameter: _shard(engine, parameter).tensors(engine)["exp_avg_sq"])
reduced_gradient = _held(_reduced_gradient, after=True)


def _flip_once(engine: Engine, size: float) -> Change:
    """Flips a bit of the first tensor that it is given in the step, in its first micro-batch."""
    now, done = Counter(engine), list[int]()

    def change(values: torch.Tensor) -> torch.Tensor:
        if now.step != AT or done:
            return values
        done.append(now.step)
        return flipped(values, int(size))

    return change


@on_bad_rank
@on_engine
def gradient(engine: Engine, size: float) -> None:
    """Before the reduction."""
    _parameter(engine).register_hook(_flip_once(engine, size))


@on_bad_rank
@on_engine
def activation(engine: Engine, size: float) -> None:
    change = _flip_once(engine, size)
    module = engine.model.get_submodule(HIT)
    module.register_forward_hook(lambda owner, args, output: change(output), prepend=True)
