"""The largest model that one machine trains with a config, and how fast: the same width with more and more layers.

    python -m lab.benchmark.largest --config config/recipes/benchmark_1b.yaml --layers 32,64,96 [--steps 3]
        [--depth model.config.num_hidden_layers] [--host-gib 100] [--processes 1] [--out FOLDER] [key.sub=value ...]

Each depth is a job of its own, from the shallowest on, until one fails. A job whose processes together take more than
`--host-gib` of this machine's memory is killed before the kernel's out-of-memory killer chooses another process: with
offload, masters and moments are in that memory. `python -m launch.plan` estimates it beforehand.

Device memory is `memory_bytes` of a step (on a CPU the resident set of the largest rank), host memory the largest sum
of the processes' proportional set sizes, sampled twice a second; memory pinned by a driver may be missing in it. Time
is the median of the steps without the first. The folder gets `largest.json` and `largest.md`, written anew after every
depth, logs and runs. Exit code 0; 3: not even the first depth trains; 2: it cannot be done.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from config.cli import Arguments, entry_point, positive_int, positive_number
from config.command_line import read_command_line
from config.errors import UserError
from config.files import write_atomically
from config.launcher import as_launched
from lab.benchmark.contestants import COMMON_OVERRIDES
from launch.job import add_processes_option, default_processes, error_line_of, train
from tracking.environment import environment
from tracking.jsonl import plain

GIB = 2**30
SHARE = 0.9
"""Of the machine's free memory, what a job may take by default."""


class HostMemory(threading.Thread):
    """Measures the memory of the job that this process starts next, and kills the job where it exceeds a limit."""

    def __init__(self, limit: float) -> None:
        """limit: [bytes]"""
        super().__init__(daemon=True)
        self.peak = 0
        """[bytes]"""
        self.exceeded = False
        self._limit = limit
        self._of_others = {child.pid for child in psutil.Process().children()}
        self._over = threading.Event()

    def run(self) -> None:
        """Sample until `close`."""
        while not self._over.wait(0.5):
            job = self._job()
            self.peak = max(self.peak, sum(map(_proportional_set, job)))
            if self.peak > self._limit:
                self.exceeded = True
                for process in job:
                    _kill(process)

    def _job(self) -> list[psutil.Process]:
        started = [child for child in psutil.Process().children() if child.pid not in self._of_others]
        return [process for child in started for process in (child, *_descendants(child))]

    def close(self) -> None:
        """Stop sampling."""
        self._over.set()
        self.join()


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:  # it has ended
        return []


def _proportional_set(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # it has ended
        return 0


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises UserError."""
    parser = Arguments("python -m lab.benchmark.largest", __doc__)
    parser.add_argument("--config", required=True, help="run config to train")
    parser.add_argument("--layers", required=True, help="depths to try, ascending, separated by commas")
    parser.add_argument("--depth", default="model.config.num_hidden_layers", help="config key of the depth")
    parser.add_argument("--steps", type=positive_int, default=3, help="timed steps of a job; one comes before them")
    parser.add_argument(
        "--host-gib", type=positive_number, help=f"memory a job may take (default: {SHARE} of what is free)"
    )
    add_processes_option(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/largest"), help="folder of the report")
    parser.add_argument("overrides", nargs="*", help="key.sub=value")
    options = parser.parse_intermixed_args(arguments)
    try:
        options.layers = [int(depth) for depth in options.layers.split(",")]
    except ValueError:
        raise UserError(f"--layers = {options.layers}: is not of the form 16,32,64") from None
    if options.layers != sorted(set(options.layers)) or options.layers[0] < 1:
        raise UserError(f"--layers = {options.layers}: give each depth once, ascending, 1 or more")
    return options


def run_depth(arguments: Sequence[str], folder: Path, label: str, *, processes: int, limit: float) -> dict[str, Any]:
    """Run one job: its parameters, step time, tokens/s and memory, or why it failed."""
    host = HostMemory(limit)
    host.start()
    code, log, events = train(arguments, folder, label, processes=processes)
    host.close()
    steps = [event for event in events if event["event"] == "step"]
    found: dict[str, Any] = {
        "parameters": next((event["parameters"] for event in events if event["event"] == "run_start"), None),
        "host_bytes": host.peak,
        "memory_bytes": max((event["memory_bytes"] for event in steps), default=None),
        "failed": None,
    }
    if host.exceeded:
        found["failed"] = f"took more than {limit / GIB:.1f} GiB of this machine's memory"
    elif code:
        found["failed"] = error_line_of(log)
    else:
        found["step_seconds"] = median(event["step_seconds"] for event in steps[1:])
        found["tokens_per_second"] = (steps[1]["tokens"] - steps[0]["tokens"]) / found["step_seconds"]
    return found


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Run the depths and write the report; the content of largest.json. Raises UserError."""
    processes = options.processes or default_processes()
    common = ["--config", options.config, *options.overrides, *COMMON_OVERRIDES, "tracking.wandb=disabled"]
    common += [f"run.steps={options.steps + 1}", "schedule.warmup_steps=1"]
    jobs = {depth: [*common, f"{options.depth}={depth}"] for depth in options.layers}
    resolved = [read_command_line(job, as_launched(processes)) for job in jobs.values()][0]
    limit = options.host_gib * GIB if options.host_gib else SHARE * psutil.virtual_memory().available
    folder = options.out.expanduser().resolve()
    for name in ("logs", "runs"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    conditions = {
        "command": shlex.join(["python", "-m", "lab.benchmark.largest", *sys.argv[1:]]),
        "compute": resolved.compute,
        "zero_stage": resolved.zero_stage,
        "offload": resolved.offload,
        "activation_checkpointing": resolved.config.model.activation_checkpointing,
        "sequence_length": resolved.config.data.sequence_length,
        "micro_size": resolved.batch.micro_size,
        "global_size": resolved.batch.global_size,
        "processes": processes,
        "host_gib": round(limit / GIB, 1),
        "environment": environment({}),
    }
    rows: dict[int, dict[str, Any]] = {}
    result: dict[str, Any] = {}
    for depth, job in jobs.items():
        rows[depth] = run_depth(job, folder, f"layers-{depth}", processes=processes, limit=limit)
        print(row_of(depth, rows[depth]), flush=True)
        depths = {str(each): row for each, row in rows.items()}
        trained = max((each for each, row in rows.items() if not row["failed"]), default=None)
        result = plain({"depths": depths, "largest": trained, "conditions": conditions})
        write_atomically(folder / "largest.json", (json.dumps(result, indent=1) + "\n").encode())
        write_atomically(folder / "largest.md", page(result).encode())
        if rows[depth]["failed"]:
            break
    return result


def row_of(depth: int, row: dict[str, Any]) -> str:
    """One line of the table."""
    size = "-" if row["parameters"] is None else f"{row['parameters']:,}"
    device, host = ("-" if row[name] is None else f"{row[name] / GIB:.2f}" for name in ("memory_bytes", "host_bytes"))
    speed = row["failed"] or f"{row['step_seconds']:.3f} s, {row['tokens_per_second']:,.0f} tokens/s"
    return f"| {depth} | {size} | {speed} | {device} | {host} |"


def page(result: dict[str, Any]) -> str:
    """largest.md."""
    conditions = result["conditions"]
    what = [name for name in conditions if name not in ("command", "environment")]
    lines = ["# The largest model", "", f"`{conditions['command']}`", ""]
    lines += [", ".join(f"{name.replace('_', ' ')} {conditions[name]}" for name in what), ""]
    lines += ["| layers | parameters | a step | device memory, GiB | host memory, GiB |", "|---|---|---|---|---|"]
    lines += [row_of(int(depth), row) for depth, row in result["depths"].items()]
    return "\n".join(lines) + "\n"


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    result = benchmark(read_options(arguments))
    print(f"\n{page(result)}")
    return 0 if result["largest"] is not None else 3


if __name__ == "__main__":
    sys.exit(main())
