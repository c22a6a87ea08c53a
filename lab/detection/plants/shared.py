"""Mistakes that a run and its FP32 twin share, so that no comparison of the two shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from data.batches import loader
from data.batches.loader import IGNORED_LABEL, Batch
from lab.detection.plants.site import Plant, instead_of
from modeling import parameter_groups
from tools.parity import steps
from training import step
from training.engine import optimizer


@instead_of("scheduled_rate", step)
def late_rate(right: Callable[..., float], config: Any, applied: int) -> float:
    """Each update has the learning rate of the one before."""
    return right(config, max(applied - 1, 0))


@instead_of("scheduled_rate", step, steps)
def forgotten_final_rate(right: Callable[..., float], config: Any, applied: int) -> float:
    """The schedule goes down to nothing."""
    return right(replace(config, schedule=replace(config.schedule, final_ratio=0.0)), applied)


def on_batches(change: Callable[[Batch], Batch]) -> Plant:
    """A defect of the batches alone."""

    @instead_of("next_step", loader.Batches)
    @wraps(change)
    def plant(right: Callable[[Any], Batch], self: Any) -> Batch:
        return change(right(self))

    return plant


def relabelled(batch: Batch, labels: torch.Tensor) -> Batch:
    """The batch with other labels, which are counted anew."""
    return replace(batch, labels=labels, label_tokens=int((labels != IGNORED_LABEL).sum()), label_tokens_of_all=None)


@on_batches
def shifted_labels(batch: Batch) -> Batch:
    """Each label is the token after the next one."""
    return replace(batch, labels=torch.roll(batch.labels, -1, dims=-1))


@on_batches
def documents_not_kept_apart(batch: Batch) -> Batch:
    return replace(batch, position_ids=None)


@instead_of("sample_ids", loader)
def swapped_batches(right: Callable[..., Any], position: int, **options: Any) -> Any:
    """Every two batches come in the other order."""
    return right(position ^ 1, **options)


@instead_of("split_for_rank", loader)
def same_rows_on_all_ranks(right: Callable[..., Any], ids: Any, **options: Any) -> Any:
    return right(ids, **{**options, "rank": 0})


@instead_of("parameter_groups", parameter_groups, optimizer)
def decaying_norms(right: Callable[..., Any], model: Any, section: Any) -> Any:
    """Weight decay on what should have none."""
    return [{**group, "weight_decay": section.weight_decay} for group in right(model, section)]
