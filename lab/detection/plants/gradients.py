"""Gradients that are not those of the step's loss: scaled, dropped, lost, rounded, weighted wrongly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from data.batches.loader import IGNORED_LABEL, Batch
from lab.detection.plants.permanent import reweight
from lab.detection.plants.site import LINEAR, Change, around, change_gradients, instead_of, on_bad_rank, on_engine
from training.engine import Engine
from training.engine import engine as engine_module


def summed(engine: Engine, size: float) -> None:
    """Over the ranks, instead of averaged."""
    change_gradients(engine, lambda gradient: gradient * engine.world.world_size, where=LINEAR)


def scaled(engine: Engine, size: float) -> None:
    change_gradients(engine, lambda gradient: (gradient.float() * (1 + size)).to(gradient.dtype), where=LINEAR)


@on_bad_rank
@on_engine
def dropped_on_one_rank(engine: Engine, size: float) -> None:
    change_gradients(engine, torch.zeros_like, where=LINEAR)


def rounded(engine: Engine, size: float) -> None:
    """Gradients are rounded to BF16 before the reduction."""
    change_gradients(engine, lambda gradient: gradient.bfloat16().to(gradient.dtype))


def summed_in_bf16(engine: Engine, size: float) -> None:
    """Over the micro-batches of a step, each sum rounded."""
    totals: dict[int, torch.Tensor] = {}

    def add(number: int) -> Change:
        def change(gradient: torch.Tensor) -> torch.Tensor:
            before = totals.get(number, torch.zeros_like(gradient, dtype=torch.bfloat16))
            totals[number] = before + gradient.bfloat16()
            return (totals[number].float() - before.float()).to(gradient.dtype)

        return change

    for number, parameter in enumerate(engine.model.parameters()):
        parameter.register_hook(add(number))

    def backward(right: Callable[..., Any], loss: torch.Tensor, *, last: bool) -> None:
        right(loss, last=last)
        if last:
            totals.clear()

    around(engine, "backward", backward)


def divided_twice(engine: Engine, size: float) -> None:
    """The loss is divided by the number of micro-batches twice."""
    around(engine, "backward", lambda right, loss, *, last: right(loss / 2, last=last))


def dropped_last_micro_batch(engine: Engine, size: float) -> None:
    around(engine, "backward", lambda right, loss, *, last: right(loss * (0.0 if last else 1.0), last=last))


def mean_of_means(engine: Engine, size: float) -> None:
    """The mean over micro-batches of their means, not the mean over all labels."""
    counts: list[torch.Tensor] = []

    def forward_backward(right: Callable[..., Any], batch: Batch, **options: Any) -> Any:
        counts[:] = [(batch.labels != IGNORED_LABEL).sum(dim=(1, 2)).double()]
        return right(batch, **options)

    around(engine, "forward_backward", forward_backward)
    reweight(engine, lambda index: counts[0].mean() / counts[0][index])


@instead_of("label_tokens_of_all", engine_module)
def mean_of_ranks(right: Callable[..., torch.Tensor], batch: Batch, world: Any) -> torch.Tensor:
    """Each rank divides by its own labels, and the ranks are averaged."""
    return torch.full((), float(max(batch.label_tokens, 1) * world.world_size), dtype=torch.float64)


def reported_lower(engine: Engine, size: float) -> None:
    """The loss that is recorded, not the one whose gradient is taken."""
    _report(engine, lambda total: total * (1 - size))


def summed_in_fp16(engine: Engine, size: float) -> None:
    _report(engine, lambda total: total.half().double())


def _report(engine: Engine, change: Change) -> None:
    def forward_backward(right: Callable[..., Any], *args: Any, **options: Any) -> Any:
        outcome = right(*args, **options)
        return replace(outcome, loss_sum=change(outcome.loss_sum))

    around(engine, "forward_backward", forward_backward)
