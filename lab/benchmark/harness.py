"""The harness of the benchmarks: jobs that take turns, and reports of them.

Each round runs every contestant once, in an order that is reversed from round to round, and the report is rewritten
after every job, since this process may be killed without notice.
"""

from __future__ import annotations

import json
import multiprocessing
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from config.cli import Arguments
from config.errors import UserError
from config.files import write_atomically
from config.options import positive_int
from config.redact import redact_arguments
from config.resolved import Resolved
from lab.detection.made_of import gpu_name
from launch.job import add_processes_option, in_turn
from tracking.environment import environment
from tracking.jsonl import plain

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
ALL_HOLD, FAILED = 0, 3
"""Exit codes: everything was measured and every bound holds; losses differ, a job failed, or a bound does not hold."""
SHARES: tuple[Literal["sequence", "tensor", "expert"], ...] = ("sequence", "tensor", "expert")
"""The axes that ranks may share when Mantissa's own steps, observations or saves are timed."""


def seconds_of(block: Callable[[], object], device: torch.device, *, times: int = 1) -> float:
    """[s] Duration of `times` calls; on a GPU until its work is finished."""
    started = time.perf_counter()
    for _ in range(times):
        block()
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def write_json(path: Path, found: Any) -> Any:
    """Write plain JSON and return its content."""
    found = plain(found)
    write_atomically(path, (json.dumps(found, indent=1) + "\n").encode())
    return found


def job_options(module: str, description: str | None, *, steps: int, rounds: int | None = None) -> Arguments:
    """The options shared by all benchmarks of jobs. rounds: the default; None: no such option."""
    parser = Arguments(f"python -m {module}", description)
    parser.add_argument("--config", required=True, help="run config to train")
    if rounds is not None:
        parser.add_argument("--rounds", type=positive_int, default=rounds, help="how often each of them runs")
    parser.add_argument("--steps", type=positive_int, default=steps, help="timed steps of a run")
    add_processes_option(parser)
    name = module.rpartition(".")[2]
    parser.add_argument("--out", type=Path, default=Path(f"runs/{name}"), help="folder of the report")
    parser.add_argument("overrides", nargs="*", help="key.sub=value")
    return parser


def in_rounds(
    names: Sequence[str], rounds: int, run: Callable[[str, str], T], failed: dict[str, str], tell: Callable[[T], str]
) -> Iterator[dict[str, list[T]]]:
    """Run every contestant in every round; yields all runs so far, by name, after each.

    run: called with a name and the job's label. failed: filled with contestants whose job failed, and the reason; their
    later rounds are left out. Raises UserError with the first reason if no run at all succeeded.
    """
    runs: dict[str, list[T]] = {name: [] for name in names}
    for number, name in in_turn(names, rounds):
        if name in failed:
            continue
        try:
            runs[name].append(run(name, f"{name}-{number}"))
            said = tell(runs[name][-1])
        except UserError as error:
            said = failed[name] = str(error)
        print(f"round {number}  {name:<16} {said}", flush=True)
        if any(runs.values()):
            yield {name: mine for name, mine in runs.items() if mine}
    if not any(runs.values()):
        raise UserError(next(iter(failed.values())))


class Report:
    """The folder of a benchmark: NAME.json and NAME.md beside the logs and runs of its jobs."""

    def __init__(self, out: Path, name: str, page: Callable[[dict[str, Any]], str]) -> None:
        """Removes what an earlier benchmark left there."""
        self.folder, self._page = out.expanduser().resolve(), page
        self._json, self._text = (self.folder / f"{name}.{ending}" for ending in ("json", "md"))
        self.remove("logs", "runs", self._json.name, self._text.name)
        self.folder.mkdir(parents=True, exist_ok=True)

    def remove(self, *names: str) -> None:
        """Remove files and folders if they exist."""
        for path in (self.folder / name for name in names):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def write(self, found: dict[str, Any]) -> dict[str, Any]:
        """Write both files and return the content of the JSON."""
        found = write_json(self._json, found)
        write_atomically(self._text, self._page(found).encode())
        return found


def conditions(module: str, resolved: Resolved, processes: int, **more: Any) -> dict[str, Any]:
    """Conditions of jobs, for the report."""
    return {
        "command": shlex.join(["python", "-m", module, *redact_arguments(sys.argv[1:])]),
        "compute": resolved.compute,
        "zero_stage": resolved.zero_stage,
        "offload": resolved.offload,
        "attention": resolved.config.model.attention,
        "sequence_length": resolved.config.data.sequence_length,
        "micro_size": resolved.batch.micro_size,
        "global_size": resolved.batch.global_size,
        "processes": processes,
        **more,
        "environment": environment({"device": device_name()}),
    }


def device_name() -> str:
    """The GPU's name, or "cpu" without one."""
    return gpu_name() or "cpu"


def in_own_process(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call a function in its own process, so that its memory is separate and released afterwards."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments, **options).result()


@contextmanager
def polling(look: Callable[[], object], *, seconds: float) -> Iterator[None]:
    """Call `look` every `seconds` in a thread while the body runs, and once more at its end."""
    over = threading.Event()

    def poll() -> None:
        while not over.wait(seconds):
            look()

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look()
