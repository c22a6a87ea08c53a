"""The workbench of an item of the GPU check: its folder, its time limit, and the size of its work.

Every job is a process of its own, with a log. What is still running when the item's time is over is killed.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from config.cli import REPOSITORY
from config.machine.binding import usable_cpus
from config.redact import redact_arguments
from launch.job import error_line_of, launch, start, train, training_program
from tracking.events import Event

TINY = (
    *("data.source=text", f"data.path={REPOSITORY / 'data'}", "data.tokenizer=bytes", "data.sequence_length=32"),
    *("data.validation_fraction=0.2", "batch.global_size=4", "batch.micro_size=2", "evaluate.batches=1"),
    "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2}",
)
"""Overrides that make a rehearsal of any item's work: a model of a few thousand parameters on Mantissa's own source."""

T = TypeVar("T")


class ItemFailed(Exception):
    """A job of an item failed, or did not show what it should have."""

    def __init__(self, why: str, log: Path | None = None) -> None:
        super().__init__(why)
        self.log = log


@dataclass
class Bench:
    """The folder, size and time limit of an item's jobs."""

    folder: Path
    """Folder of this item alone, empty at its start."""
    cache: Path
    """Folder of prepared data, shared by all items."""
    processes: int
    """Processes of each job."""
    tiny: bool
    """Rehearse: the same jobs, on a model of a few thousand parameters."""
    limit: float
    """[seconds] Time for all of its jobs together, counted from now."""
    device: str = "cpu"
    """Name of the first GPU, as the driver reports it."""
    device_bytes: int | None = None
    """[bytes] Memory of the first GPU; None without one."""
    commands: list[str] = field(default_factory=list)
    """Command lines of the jobs so far."""
    found: dict[str, Any] = field(default_factory=dict)
    """Figures so far, of an item that did not come to its end."""

    def __post_init__(self) -> None:
        self._ends = time.monotonic() + self.limit

    @property
    def left(self) -> float:
        """[seconds] Time left for the item; more than 0."""
        return max(0.01, self._ends - time.monotonic())

    def either(self, full: T, tiny: T) -> T:
        """The one for this size."""
        return tiny if self.tiny else full

    def arguments(self, recipe: str, *overrides: str) -> list[str]:
        """train.py's arguments for a recipe of config/recipes; a rehearsal's size comes last."""
        shared = [f"data.cache_dir={self.cache}", f"data.workers={min(8, len(usable_cpus()))}"]
        if find_spec("wandb") is None:
            shared.append("tracking.wandb=disabled")
        config = str(REPOSITORY / f"config/recipes/{recipe}.yaml")
        return ["--config", config, *shared, *overrides, *self.either((), TINY)]

    @contextmanager
    def keeping(self, read: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """Keep the figures that `read` finds if the body fails or is killed."""
        try:
            yield
        except (ItemFailed, subprocess.TimeoutExpired):
            with suppress(OSError, ValueError, LookupError, ItemFailed):
                self.found = read()
            raise

    def train(self, name: str, arguments: Sequence[str]) -> list[Event]:
        """The events of a finished run of train.py. Raises ItemFailed, TimeoutExpired."""
        self._note(training_program(arguments, self.folder, name))
        code, log, events = train(arguments, self.folder, name, processes=self.processes, seconds=self.left)
        if code:
            raise ItemFailed(error_line_of(log), log)
        return events

    def start(self, name: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a run of train.py in the background; `launch.job.kill` ends it."""
        program = training_program(arguments, self.folder, name)
        self._note(program)
        return start(program, processes=self.processes, log=self.folder / "logs" / f"{name}.log")

    def tool(self, module: str, *arguments: str, codes: Sequence[int] = (0,), leads: bool = False) -> str:
        """Run `python -m module` to its end; what it printed.

        codes: exit codes that are a result. leads: it starts its processes itself, so that it is one process here.
        Raises ItemFailed, TimeoutExpired.
        """
        program = ["-m", module, *arguments]
        self._note(program)
        log = self.folder / "logs" / f"{module.rpartition('.')[2]}-{len(self.commands)}.log"
        code = launch(program, processes=1 if leads else self.processes, log=log, seconds=self.left)
        if code not in codes:
            raise ItemFailed(error_line_of(log), log)
        return log.read_text(encoding="utf-8", errors="replace").partition("\n")[2]

    def _note(self, program: Sequence[str]) -> None:
        self.commands.append(shlex.join(["python", *redact_arguments(list(program))]))


def newest_log(folder: Path) -> Path | None:
    """The log that was written to last, of an item's jobs or of those that they started."""
    logs = sorted(folder.rglob("*.log"), key=lambda path: path.stat().st_mtime)
    return logs[-1] if logs else None
