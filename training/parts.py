"""The named collaborators of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from config.command_line import Resolved
from data.loader import Batch, Batches
from precision.guard import Guard
from tracking.record import Record
from training.checkpoint import Checkpoints
from training.engine import Engine
from training.preemption import Preemption
from training.profiling import Profiling
from training.recovery import Promotions
from training.telemetry import Telemetry
from training.tracing import Tracing


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
