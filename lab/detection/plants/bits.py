"""One bit that flips on one rank, at one step: in what the rank holds, or in what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lab.detection.plants.site import MLP, Site, around
from training.engine import Engine
from training.engine.flips import flip_bit, flipped
from training.engine.tensors import local_gradient, shard_of

AT = 8
"""The attempted step."""
HIT = f"{MLP}.down_proj"
"""At every ZeRO stage the bad rank holds some of it."""


def _parameter(engine: Engine) -> Any:
    return next(engine.model.get_submodule(HIT).parameters())


def _held(find: Callable[[Engine, Any], torch.Tensor]) -> Callable[[Site], None]:
    """Before the passes of the step."""

    def plant(site: Site) -> None:
        def strike(engine: Engine) -> None:
            done: list[int] = []

            def striking(right: Callable[..., Any]) -> Callable[..., Any]:
                def forward_backward(batch: Any, *, step: int, **options: Any) -> Any:
                    if step == AT and not done:
                        done.append(step)
                        values = find(engine, _parameter(engine))
                        flip_bit(values, values.numel() // 2, int(site.size))
                    return right(batch, step=step, **options)

                return forward_backward

            around(engine, "forward_backward", striking)

        if site.is_bad_rank:
            site.when_built(strike)

    return plant


def _weight(engine: Engine, parameter: Any) -> torch.Tensor:
    whole = engine.stage < 3 or parameter.numel()
    held: torch.Tensor = parameter.data if whole else parameter.ds_tensor.data
    return held


def _shard(engine: Engine, parameter: Any) -> Any:
    shard = shard_of(engine, parameter)
    assert shard is not None, "this rank has none of it"
    return shard


weight = _held(_weight)
master = _held(lambda engine, parameter: _shard(engine, parameter).tensors(engine)["master"])
first_moment = _held(lambda engine, parameter: _shard(engine, parameter).tensors(engine)["exp_avg"])
second_moment = _held(lambda engine, parameter: _shard(engine, parameter).tensors(engine)["exp_avg_sq"])


def _computed(site: Site, watch: Callable[[Engine, Callable[[torch.Tensor], torch.Tensor]], None]) -> None:
    """The plant, once, in the first micro-batch of the step."""

    def strike(engine: Engine) -> None:
        state = {"armed": False, "done": False}

        def change(values: torch.Tensor) -> torch.Tensor:
            if not state["armed"] or state["done"]:
                return values
            state["done"] = True
            return flipped(values, int(site.size))

        def striking(right: Callable[..., Any]) -> Callable[..., Any]:
            def forward_backward(batch: Any, *, step: int, **options: Any) -> Any:
                state["armed"] = step == AT
                return right(batch, step=step, **options)

            return forward_backward

        watch(engine, change)
        around(engine, "forward_backward", striking)

    if site.is_bad_rank:
        site.when_built(strike)


def gradient(site: Site) -> None:
    """Before the reduction."""

    def watch(engine: Engine, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        _parameter(engine).register_hook(change)

    _computed(site, watch)


def activation(site: Site) -> None:
    def watch(engine: Engine, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        module = engine.model.get_submodule(HIT)
        module.register_forward_hook(lambda owner, args, output: change(output), prepend=True)

    _computed(site, watch)


def reduced_gradient(site: Site) -> None:
    """After the reduction, in this rank's part."""

    def strike(engine: Engine) -> None:
        done: list[int] = []

        def striking(right: Callable[..., Any]) -> Callable[..., Any]:
            def forward_backward(batch: Any, *, step: int, **options: Any) -> Any:
                outcome = right(batch, step=step, **options)
                if step == AT and not done:
                    done.append(step)
                    parameter = _parameter(engine)
                    values = local_gradient(parameter, _shard(engine, parameter), engine.stage)
                    assert values is not None
                    flip_bit(values, len(values) // 2, int(site.size))
                return outcome

            return forward_backward

        around(engine, "forward_backward", striking)

    if site.is_bad_rank:
        site.when_built(strike)
