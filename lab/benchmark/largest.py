"""The largest model that one machine trains with a config, and how fast: the same width with more and more layers.

    python -m lab.benchmark.largest --config config/recipes/benchmark_1b.yaml --layers 32,64,96 [--steps 3]
        [--host-gib 100] [--processes 1] [--out FOLDER] [key.sub=value ...]

Each depth is its own job, starting with the shallowest, until one fails. A job whose processes together take more than
`--host-gib` of this machine's memory (the sum of their proportional set sizes) is killed before the kernel's
out-of-memory killer chooses another process. The folder gets `largest.json` and `largest.md`, logs and runs. Exit code
0; 3: not even the first depth trains; 2: not possible.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from config.cli import entry_point
from config.command_line import read_command_line
from config.errors import UserError
from config.launcher import as_launched
from config.options import comma_separated, positive_int, positive_number
from lab.benchmark.contestants import COMMON_OVERRIDES
from lab.benchmark.harness import ALL_HOLD, FAILED, Report, conditions, job_options, polling
from launch.job import default_processes, error_line_of, train
from tracking.pages import markdown
from tracking.pages.markdown import Table

GIB = 2**30
SHARE = 0.9
"""Default share of the machine's free memory that a job may take."""


class HostMemory:
    """Measures the memory of the job that this process starts next, and kills the job if it exceeds a limit."""

    def __init__(self, limit: float) -> None:
        """limit: [bytes]"""
        self.peak = 0
        """[bytes]"""
        self._limit = limit
        self._others = {child.pid for child in psutil.Process().children()}

    @property
    def exceeded(self) -> bool:
        """Whether the job was killed."""
        return self.peak > self._limit

    def look(self) -> None:
        """Sample the memory of the job's processes, ignoring those that end meanwhile."""
        job: list[psutil.Process] = []
        now = 0
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                job += [child, *child.children(recursive=True)] if child.pid not in self._others else []
        for process in job:
            with suppress(psutil.Error):
                now += process.memory_full_info().pss
        self.peak = max(self.peak, now)
        for process in job if self.exceeded else ():
            with suppress(psutil.Error):
                process.kill()


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises UserError."""
    parser = job_options("lab.benchmark.largest", __doc__, steps=3)
    parser.add_argument("--layers", type=comma_separated(positive_int), required=True, help="depths to try, ascending")
    parser.add_argument("--host-gib", type=positive_number, help=f"memory a job may take ({SHARE} of what is free)")
    options = parser.parse_intermixed_args(arguments)
    if options.layers != sorted(set(options.layers)):
        raise UserError(f"--layers = {options.layers}: give each depth once, ascending")
    return options


def run_depth(arguments: Sequence[str], folder: Path, label: str, *, processes: int, limit: float) -> dict[str, Any]:
    """Run one job: its parameters, step time, tokens/s and memory, or why it failed."""
    host = HostMemory(limit)
    with polling(host.look, seconds=0.5):
        code, log, events = train(arguments, folder, label, processes=processes)
    steps = [event for event in events if event["event"] == "step"]
    found: dict[str, Any] = {
        "parameters": next((event["parameters"] for event in events if event["event"] == "run_start"), None),
        "host_bytes": host.peak,
        "memory_bytes": max((event["memory_bytes"] for event in steps), default=None),
        "failed": error_line_of(log) if code else None,
    }
    if host.exceeded:
        found["failed"] = f"took more than {limit / GIB:.1f} GiB of this machine's memory"
    if not found["failed"]:
        seconds = [event["step_seconds"] for event in steps[1:]]
        found["step_seconds"] = median(seconds)
        found["tokens_per_second"] = (steps[-1]["tokens"] - steps[0]["tokens"]) / sum(seconds)
    return found


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Run the depths and write the report; returns the content of largest.json. Raises UserError."""
    processes = options.processes or default_processes()
    common = ["--config", options.config, *options.overrides, *COMMON_OVERRIDES, "tracking.wandb=disabled"]
    common += [f"run.steps={options.steps + 1}", "schedule.warmup_steps=1"]
    jobs = {depth: [*common, f"model.config.num_hidden_layers={depth}"] for depth in options.layers}
    resolved = [read_command_line(job, as_launched(processes)) for job in jobs.values()][0]
    limit = options.host_gib * GIB if options.host_gib else SHARE * psutil.virtual_memory().available
    report = Report(options.out, "largest", page)
    checkpointing = resolved.config.model.activation_checkpointing
    more = {"activation_checkpointing": checkpointing, "host_gib": round(limit / GIB, 1)}
    about = conditions("lab.benchmark.largest", resolved, processes, **more)
    rows: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {"largest": None}
    for depth, job in jobs.items():
        row = rows[str(depth)] = run_depth(job, report.folder, f"layers-{depth}", processes=processes, limit=limit)
        print("  ".join(cells(depth, row)), flush=True)
        largest = result["largest"] if row["failed"] else depth
        result = report.write({"depths": rows, "largest": largest, "conditions": about})
        if row["failed"]:
            break
    return result


def cells(depth: int | str, row: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    size = "-" if row["parameters"] is None else f"{row['parameters']:,}"
    memory = ["-" if row[name] is None else f"{row[name] / GIB:.2f}" for name in ("memory_bytes", "host_bytes")]
    speed = row["failed"] or f"{row['step_seconds']:.3f} s, {row['tokens_per_second']:,.0f} tokens/s"
    return [str(depth), size, speed, *memory]


def page(result: Mapping[str, Any]) -> str:
    """largest.md."""
    about, head = result["conditions"], ["layers", "parameters", "a step", "device memory, GiB", "host memory, GiB"]
    said = {key.replace("_", " "): value for key, value in about.items() if key not in ("command", "environment")}
    words = ", ".join(f"{key} {value}" for key, value in said.items())
    table = Table(head, [cells(*each) for each in result["depths"].items()])
    return markdown.page("# The largest model", f"`{about['command']}`", words, table)


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    result = benchmark(read_options(arguments))
    print(f"\n{page(result)}")
    return ALL_HOLD if result["largest"] is not None else FAILED


if __name__ == "__main__":
    sys.exit(main())
