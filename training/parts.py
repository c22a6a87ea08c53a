"""The parts of a run: their state in a checkpoint, and those that observe its steps."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from config.resolved import Resolved
from data.batches.loader import Batch, Batches
from precision.guard import Guard
from precision.promotions import Promotions
from tracking.record import Record
from training.checkpoint.checkpoints import Checkpoints
from training.corruption.checks import Checks
from training.corruption.self_check import SelfCheck
from training.early_warnings import EarlyWarnings
from training.engine import Engine
from training.preemption import Preemption
from training.profile.profiler import Profiling
from training.progress import Progress
from training.telemetry import Telemetry


@dataclass(frozen=True)
class Parts:
    """The parts of a run by name, built once (`training.build.assemble`)."""

    resolved: Resolved
    engine: Engine
    batches: Batches
    guard: Guard
    promotions: Promotions
    checkpoints: Checkpoints
    record: Record
    warnings: EarlyWarnings
    first_step: int
    """Steps attempted before this session."""
    validation: Callable[[], Iterable[Batch]] = tuple
    """Returns the validation set's batches, from its start."""
    validation_by_source: Callable[[], dict[str, Iterable[Batch]]] = dict
    """The same for each source of a mixture."""
    sample: Callable[[], str] = str
    """Samples text from the model; empty for none. A collective."""
    examples: Callable[[], str] = str
    """Returns the newest evaluation's prompts with answers and rewards; empty for a task that samples none."""
    preemption: Preemption = field(default_factory=lambda: Preemption(signals=False))
    checks: Checks | None = None
    self_check: SelfCheck | None = None
    telemetry: Telemetry | None = None
    tracing: Any = None
    """A `tracking.tracing.spans.Tracing`, if configured."""
    profiling: Profiling | None = None

    def state_dict(self, progress: Progress) -> dict[str, Any]:
        """The state in a checkpoint besides DeepSpeed's files and the random generators, as plain types."""
        return {
            "progress": asdict(progress),
            "scaler": self.engine.scaler_state(),
            "batches": dict(self.batches.record),
            "reactions": {
                "guard": self.guard.state_dict(),
                "promotions": self.promotions.state_dict(self.engine.adjustable),
                "warnings": self.warnings.state_dict(),
            },
        }

    def load_state_dict(self, state: dict[str, Any], *, keep_budgets: bool = False) -> Progress:
        """The inverse of `state_dict`; returns the progress. keep_budgets: used reactions stay used, for a rollback."""
        progress, reactions = Progress(**state["progress"]), state["reactions"]
        self.engine.install_scaler(state["scaler"])
        (self.guard.roll_back if keep_budgets else self.guard.load_state_dict)(reactions["guard"])
        self.promotions.load_state_dict(reactions["promotions"], self.engine.adjustable)
        self.warnings.load_state_dict(reactions.get("warnings"))
        self.batches.restore(progress.position)
        self.batches.record = dict(state.get("batches", {}))
        if self.checks is not None:
            self.checks.forget()
        if self.self_check is not None:
            self.self_check.forget(state["scaler"])
        return progress

    def watching(self, progress: Progress) -> AbstractContextManager[Any]:
        """Context of spans and profiler, if configured, for one attempted step. progress: before the step."""
        stack = ExitStack()
        if self.profiling is not None:
            stack.enter_context(self.profiling.step(progress.step + 1))
        if self.tracing is not None:
            stack.enter_context(self.tracing.step(progress.step + 1, progress.tokens))
        return stack

    def stop_watching(self) -> None:
        """Write the profile as far as it got and send the last spans, for at most a few seconds."""
        for observer in (self.profiling, self.tracing):
            if observer is not None:
                observer.close()
