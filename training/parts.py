"""The named collaborators of a run, and the two of them that watch its steps: spans and the profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

from config.resolved import Resolved
from data.loader import Batch, Batches
from precision.guard import Guard
from tracking.record import Record
from training.checkpoint.checkpoints import Checkpoints
from training.engine import Engine
from training.preemption import Preemption
from training.profile.profiler import Profiling
from training.progress import Progress
from training.promotions import Promotions
from training.telemetry import Telemetry
from training.tracing.spans import Tracing


@dataclass(frozen=True)
class Parts:
    """The named collaborators of a run, built once."""

    resolved: Resolved
    engine: Engine
    batches: Batches
    validation: Callable[[], Iterable[Batch]]
    guard: Guard
    promotions: Promotions
    checkpoints: Checkpoints
    preemption: Preemption
    telemetry: Telemetry | None
    record: Record
    first_step: int
    """Steps attempted before this session."""
    tracing: Tracing | None = None
    profiling: Profiling | None = None


_NOBODY = nullcontext()


def watching(parts: Parts, progress: Progress) -> AbstractContextManager[Any]:
    """Around one attempted step; progress: before it."""
    if parts.tracing is None and parts.profiling is None:
        return _NOBODY
    stack = ExitStack()
    if parts.profiling is not None:
        stack.enter_context(parts.profiling.step(progress.step + 1))
    if parts.tracing is not None:
        stack.enter_context(parts.tracing.step(progress))
    return stack


def stop_watching(parts: Parts) -> None:
    """Write what there is of a profile and send the last spans, for at most a few seconds."""
    if parts.profiling is not None:
        parts.profiling.close()
    if parts.tracing is not None:
        parts.tracing.close()
