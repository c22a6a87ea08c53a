"""Working environment of one item of the GPU check: its folder, time limit and problem size.

Every job runs in its own process, with a log, and is killed when the item's time is up.
"""

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
"""Overrides that shrink any item to a rehearsal: a model of a few thousand parameters on Mantissa's own source code."""

T = TypeVar("T")


class ItemFailed(Exception):
    """A job failed or its output lacks the expected result."""

    def __init__(self, why: str, log: Path | None = None) -> None:
        super().__init__(why)
        self.log = log


@dataclass
class Bench:
    """Folder, problem size and time limit of an item's jobs."""

    folder: Path
    """The item's own, initially empty."""
    cache: Path
    """Prepared data, shared by all items."""
    processes: int
    """Ranks per job."""
    tiny: bool
    """Rehearsal: the same jobs with a model of a few thousand parameters."""
    limit: float
    """[seconds] For all jobs together, counted from construction."""
    device: str = "cpu"
    """Name of the first GPU, as reported by the driver."""
    device_bytes: int | None = None
    """[bytes] Memory of the first GPU; None without one."""
    commands: list[str] = field(default_factory=list)
    """Command lines of the jobs so far."""
    found: dict[str, Any] = field(default_factory=dict)
    """Partial figures of an item that failed or was killed."""

    def __post_init__(self) -> None:
        self._ends = time.monotonic() + self.limit

    @property
    def left(self) -> float:
        """[seconds] Remaining time of the item, always positive."""
        return max(0.01, self._ends - time.monotonic())

    def either(self, full: T, tiny: T) -> T:
        """`tiny` in a rehearsal, else `full`."""
        return tiny if self.tiny else full

    def arguments(self, recipe: str, *overrides: str) -> list[str]:
        """Arguments to train.py for a recipe of config/recipes; those of a rehearsal come last and win."""
        shared = [f"data.cache_dir={self.cache}", f"data.workers={min(8, len(usable_cpus()))}"]
        if find_spec("wandb") is None:
            shared.append("tracking.wandb=disabled")
        config = str(REPOSITORY / f"config/recipes/{recipe}.yaml")
        return ["--config", config, *shared, *overrides, *self.either((), TINY)]

    @contextmanager
    def keeping(self, read: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """Context manager: if its body fails or times out, store whatever figures `read` finds."""
        try:
            yield
        except (ItemFailed, subprocess.TimeoutExpired):
            with suppress(OSError, ValueError, LookupError, ItemFailed):
                self.found = read()
            raise

    def train(self, name: str, arguments: Sequence[str]) -> list[Event]:
        """Run train.py to completion and return its events. Raises ItemFailed or TimeoutExpired."""
        self._note(training_program(arguments, self.folder, name))
        code, log, events = train(arguments, self.folder, name, processes=self.processes, seconds=self.left)
        if code:
            raise ItemFailed(error_line_of(log), log)
        return events

    def start(self, name: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start train.py in the background; stop it with `launch.job.kill`."""
        program = training_program(arguments, self.folder, name)
        self._note(program)
        return start(program, processes=self.processes, log=self.folder / "logs" / f"{name}.log")

    def tool(self, module: str, *arguments: str, codes: Sequence[int] = (0,), leads: bool = False) -> str:
        """Run `python -m module` to completion and return its output. Raises ItemFailed or TimeoutExpired.

        codes: exit codes that do not count as failure. leads: the tool launches its own ranks, so start one process.
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
    """The most recently modified log under `folder`, including those of nested jobs."""
    logs = sorted(folder.rglob("*.log"), key=lambda path: path.stat().st_mtime)
    return logs[-1] if logs else None
