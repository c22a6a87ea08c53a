"""Mistakes that a run and its FP32 twin share, so that no comparison of the two shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from data.batches import loader
from data.batches.loader import IGNORED_LABEL, Batch
from lab.detection.plants.site import Plant, Site
from modeling import parameter_groups
from tools.parity import steps
from training import step
from training.engine import optimizer


def late_rate(site: Site) -> None:
    """Each update has the learning rate of the one before."""
    right = step.scheduled_rate
    site.patch(step, "scheduled_rate", lambda config, applied: right(config, max(applied - 1, 0)))


def forgotten_final_rate(site: Site) -> None:
    """The schedule goes down to nothing."""
    right = step.scheduled_rate

    def wrong(config: Any, applied: int) -> float:
        return right(replace(config, schedule=replace(config.schedule, final_ratio=0.0)), applied)

    for module in (step, steps):
        site.patch(module, "scheduled_rate", wrong)


def change_batches(site: Site, change: Callable[[Batch], Batch]) -> None:
    """Train on changed batches."""
    right = loader.Batches.next_step
    site.patch(loader.Batches, "next_step", lambda self: change(right(self)))


def on_batches(change: Callable[[Batch], Batch]) -> Plant:
    """A defect of the batches alone."""

    @wraps(change)
    def plant(site: Site) -> None:
        change_batches(site, change)

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


def swapped_batches(site: Site) -> None:
    """Every two batches come in the other order."""
    right = loader.sample_ids
    site.patch(loader, "sample_ids", lambda position, **options: right(position ^ 1, **options))


def same_rows_on_all_ranks(site: Site) -> None:
    right = loader.split_for_rank
    site.patch(loader, "split_for_rank", lambda ids, **options: right(ids, **{**options, "rank": 0}))


def decaying_norms(site: Site) -> None:
    """Weight decay on what should have none."""
    right = parameter_groups.parameter_groups

    def wrong(model: Any, section: Any) -> Any:
        return [{**group, "weight_decay": section.weight_decay} for group in right(model, section)]

    for module in (parameter_groups, optimizer):
        site.patch(module, "parameter_groups", wrong)
