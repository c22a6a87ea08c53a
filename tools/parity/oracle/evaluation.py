"""The evaluations that a run reported, recomputed in plain torch from the masters in the checkpoints of their steps.

An evaluation's rows, what its mean is over, and the mode and weights that it ran with: both twins of a gate share the
code for all of these, so nothing else checks it. A run is compared with plain torch in its dtype: its masters rounded
once, rows one by one; if its modules compute in several dtypes, with FP64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from config.errors import UserError
from tools.parity.oracle.comparison import Comparison, relative_difference
from tools.parity.oracle.tasks import Task
from tools.parity.plain import in_dtype
from tracking.run_dir import RunDir
from training.checkpoint.partitions import open_saved_model

VALIDATION, BY_SOURCE, METRICS = "validation loss", "validation loss by source", "validation metrics"
SAME = 2e-6
"""Relative difference that FP32 sums cause."""
_ERRORS = 6 * math.sqrt(2)
"""Standard errors of one evaluation by which two with the same roundings in a different order may differ."""


@dataclass(frozen=True)
class Evaluated:
    """One evaluation, recomputed."""

    losses: np.ndarray
    """Losses of the parts, summed over what counts in each."""
    counts: int
    metrics: Mapping[str, float]

    @property
    def loss(self) -> float:
        """The mean over everything that counts."""
        return float(self.losses.sum()) / max(self.counts, 1)


@torch.no_grad()
def evaluated(task: Task) -> Evaluated:
    """Compute the evaluation of a `held_out` task with its current models."""
    parts = [part for place, ids in enumerate(task.order.evaluated()) for part in task.parts(ids, place)]
    losses = np.array([float(part.loss()) for part in parts])
    return Evaluated(losses, sum(part.counts for part in parts), task.metrics() if parts else {})


def slack(plain: Evaluated, exact: Evaluated) -> float:
    """How far a mean in 16 bits may be from plain torch's in that dtype, in nats.

    exact: in FP32 from the same rounded weights. The distances of its parts from plain torch's are one sample of what
    the dtype's rounding does to a part, and the run's own are another.
    """
    return _ERRORS * float(np.linalg.norm(plain.losses - exact.losses)) / max(plain.counts, 1)


@torch.no_grad()
def load_masters(model: Any, folder: Path) -> None:
    """Set a model's trained parameters to the masters in a checkpoint. Raises UserError if they cannot be read."""
    saved = open_saved_model(folder).tensors
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(saved[name].read())


def compare_evaluations(
    task: Task,
    buffers: Mapping[str, torch.dtype],
    run_dir: RunDir,
    events: Sequence[Mapping[str, Any]],
    *,
    bound: float,
) -> tuple[list[Comparison], list[str]]:
    """Recompute every evaluation whose step has a checkpoint; returns comparisons, and notes on what was judged.

    buffers: dtypes of the model's buffers. bound: on the loss, if modules compute in several dtypes. Differences are
    relative to the loss, or to the first step's if that is larger: a loss that has nearly vanished keeps the roundings
    of its logits.
    """
    first = next((abs(event["loss"]) for event in events if event["event"] == "step"), 0.0)
    start = next(event for event in events if event["event"] == "run_start")
    model, found, notes = task.model, list[Comparison](), list[str]()
    compute = None if start["regions"] else start["compute"]
    models = {model: compute} | ({task.frozen[0]: task.frozen[1] or compute} if task.frozen is not None else {})
    for event in (each for each in events if each["event"] == "eval"):
        folder, where = run_dir.checkpoints / f"step-{event['step']}" / "deepspeed", f"step {event['step']}"
        if not folder.is_dir():
            continue
        try:
            load_masters(model, folder)
        except UserError as problem:  # such as one that is encrypted
            notes.append(f"no evaluation compared: {problem}")
            continue
        model.eval()
        for part, shards in {"": task.corpus.validation, **task.corpus.validation_by_source}.items():
            with in_dtype(models, buffers) if compute is not None else nullcontext():
                expected = evaluated(task.held_out(shards))
            scale, allowed = max(abs(expected.loss), first), bound
            reported = event["by_source"][part] if part else event["loss"]
            if compute in ("bf16", "fp16"):
                allowed = SAME
                if not abs(reported - expected.loss) <= SAME * scale:  # what rounding explains takes as long again
                    with in_dtype(models, buffers, computed=torch.float32):
                        allowed += slack(expected, evaluated(task.held_out(shards))) / scale
            row = Comparison(BY_SOURCE if part else VALIDATION, allowed)
            row.add(abs(reported - expected.loss) / scale, f"{part} {where}".strip())
            found.append(row)
            if not part:
                least = row.bound if compute == "fp32" else 16 * bound + 2 / max(len(expected.losses), 1)
                found.append(_of_metrics(event, expected, bound=least, where=where))
        notes.append(f"evaluation compared: {where}")
    return found, notes or ["no evaluation compared: the run has no checkpoint of a step that evaluated"]


def _of_metrics(event: Mapping[str, Any], expected: Evaluated, *, bound: float, where: str) -> Comparison:
    """The metrics and the perplexity of an `eval` event, relative to the largest metric or to 1.

    bound: coarse in 16 bits, where rounding decides which of two labels is the likelier.
    """
    row = Comparison(METRICS, bound)
    if event["perplexity"] is not None and event["loss"] < 700:
        row.add(relative_difference(event["perplexity"], math.exp(event["loss"])), f"perplexity, {where}")
    for name, value in event.get("metrics", {}).items():
        known = expected.metrics[name]
        ties = 1 / expected.counts if name == "teacher_agreement" else 0.0  # two tokens can be equally likely in FP32
        off = max(abs(value - known) - ties, 0.0)  # in this order nan stays nan
        row.add(off / max(1.0, *map(abs, expected.metrics.values())), f"{name}, {where}")
    return row
