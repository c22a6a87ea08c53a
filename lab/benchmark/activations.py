"""Step time against peak memory for each mode of activation checkpointing: the same work, in turn, as real jobs.

    python -m lab.benchmark.activations --config config/recipes/demo.yaml [--rounds 3] [--steps 10]
        [--modes none,ops,attention,selective:4,selective:2,full,full:reentrant] [--processes 2] [--out FOLDER]
        [key.sub=value ...]

A mode is a value of model.activation_checkpointing, with `:4` for model.checkpointing_every, `:1.5` for
model.activation_memory_gib of budget, or `:reentrant`. Each round runs every mode once, each in processes of its own,
in an order that is reversed from round to round; its time is that of a step in the median of all rounds, its memory the
largest `memory_bytes` of a step: on a GPU what torch has allocated, else the process's resident set, which includes
Python, torch and DeepSpeed. On a CPU the modes run with MALLOC_MMAP_THRESHOLD_=65536 unless it is set, so that glibc
returns freed memory to the system.

The folder gets `activations.json` and `activations.md`, written anew after every run, logs and runs. A mode whose job
fails, as one that needs more memory than there is, is a row that says why. Exit code 0; 3: losses differ, which
recomputing must not cause, or a mode failed; 2: it cannot be done.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from config.cli import Arguments, entry_point, positive_int
from config.command_line import read_command_line
from config.errors import UserError
from config.files import write_atomically
from config.launcher import as_launched
from lab.benchmark.contestants import COMMON_OVERRIDES
from launch.job import add_processes_option, default_processes, error_line_of, in_turn, train
from tracking.environment import environment
from tracking.jsonl import plain

MODES = "none,ops,attention,selective:4,selective:2,full,full:reentrant"
WARM_UP = 3
"""[steps] Not timed."""
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}
"""Largest relative difference of a step's loss from the first mode's. On a CPU they are equal."""


def overrides_of(mode: str) -> list[str]:
    """The config keys of a mode such as selective:4. The values are not checked here, the config does that."""
    name, _, detail = mode.partition(":")
    key = "model.activation_checkpointing"
    found = {key: name, "model.checkpointing_every": "2", "model.activation_memory_gib": "null"}
    found["model.checkpointing_reentrant"] = "true" if detail == "reentrant" else "false"
    if detail and detail != "reentrant":
        found["model.activation_memory_gib" if name == "budget" else "model.checkpointing_every"] = detail
    return [f"{key}={value}" for key, value in found.items()]


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises UserError."""
    parser = Arguments("python -m lab.benchmark.activations", __doc__)
    parser.add_argument("--config", required=True, help="run config to train")
    parser.add_argument("--modes", default=MODES, help="separated by commas; compared with the first")
    parser.add_argument("--rounds", dest="repeats", type=positive_int, default=3, help="how often each of them runs")
    parser.add_argument(
        "--steps", type=positive_int, default=10, help=f"timed steps of a run; {WARM_UP} come before them"
    )
    add_processes_option(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/activations"), help="folder of the report")
    parser.add_argument("overrides", nargs="*", help="key.sub=value")
    return parser.parse_intermixed_args(arguments)


def run_mode(arguments: Sequence[str], folder: Path, label: str, processes: int) -> dict[str, Any]:
    """Run one job: its step times [s], losses and peak memory. Raises UserError when it fails."""
    code, log, events = train(arguments, folder, label, processes=processes)
    if code:
        raise UserError(f"{label} failed: {error_line_of(log)}; see {log}")
    steps = [event for event in events if event["event"] == "step"]
    return {
        "seconds": [event["step_seconds"] for event in steps[WARM_UP:]],
        "losses": [event["loss"] for event in steps],
        "memory_bytes": max(event["memory_bytes"] for event in steps),
    }


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Run all modes, compare them, and write the report; the content of activations.json. Raises UserError."""
    modes, processes = options.modes.split(","), options.processes or default_processes()
    steps = options.steps + WARM_UP
    common = ["--config", options.config, *options.overrides, *COMMON_OVERRIDES]
    common += [f"run.steps={steps}", "schedule.warmup_steps=1"]
    jobs = {mode: [*common, *overrides_of(mode)] for mode in modes}
    resolved = [read_command_line(job, as_launched(processes)) for job in jobs.values()][0]
    folder = options.out.expanduser().resolve()
    for name in ("logs", "runs"):
        shutil.rmtree(folder / name, ignore_errors=True)
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    conditions = {
        "command": shlex.join(["python", "-m", "lab.benchmark.activations", *sys.argv[1:]]),
        "compute": resolved.compute,
        "zero_stage": resolved.zero_stage,
        "attention": resolved.config.model.attention,
        "sequence_length": resolved.config.data.sequence_length,
        "micro_size": resolved.batch.micro_size,
        "processes": processes,
        "rounds": options.repeats,
        "steps": options.steps,
        "environment": environment({}),
    }
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    failed: dict[str, str] = {}
    result: dict[str, Any] = {}
    for number, mode in in_turn(modes, options.repeats):
        if mode in failed:
            continue
        try:
            run = run_mode(jobs[mode], folder, f"{mode.replace(':', '-')}-{number}", processes)
        except UserError as error:
            failed[mode] = str(error)
            print(f"round {number}  {mode:<16} {error}", flush=True)
        else:
            found[mode].append(run)
            line = f"{median(run['seconds']):8.3f} s a step, {run['memory_bytes'] / 2**30:6.2f} GiB"
            print(f"round {number}  {mode:<16} {line}", flush=True)
        measured = {mode: runs for mode, runs in found.items() if runs}
        if not measured:
            continue
        rows = {mode: summary(runs, first=next(iter(measured.values()))) for mode, runs in measured.items()}
        differ = [mode for mode, row in rows.items() if row["loss_difference"] > TOLERANCE[resolved.compute]]
        result = plain({"modes": rows, "part": differ, "failed": failed, "conditions": conditions})
        write_atomically(folder / "activations.json", (json.dumps(result, indent=1) + "\n").encode())
        write_atomically(folder / "activations.md", page(result).encode())
    if not result:
        raise UserError(next(iter(failed.values())))
    return result


def summary(runs: Sequence[dict[str, Any]], *, first: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over a mode's runs, and of their ratios to the first measured mode's runs, round by round."""
    medians = [median(run["seconds"]) for run in runs]
    losses = zip(runs[0]["losses"], first[0]["losses"], strict=True)
    return {
        "step_seconds": median(medians),
        "time_ratio": median(mine / median(other["seconds"]) for mine, other in zip(medians, first, strict=False)),
        "memory_bytes": median(run["memory_bytes"] for run in runs),
        "saved_bytes": median(
            other["memory_bytes"] - run["memory_bytes"] for run, other in zip(runs, first, strict=False)
        ),
        "loss_difference": max(abs(ours - theirs) / abs(theirs) for ours, theirs in losses),
        "runs": list(runs),
    }


def page(result: dict[str, Any]) -> str:
    """activations.md."""
    conditions, modes = result["conditions"], result["modes"]
    first = next(iter(modes))
    what = ("compute", "zero_stage", "attention", "sequence_length", "micro_size", "processes", "rounds", "steps")
    lines = [
        "# Activation checkpointing: time against memory",
        "",
        f"`{conditions['command']}`",
        "",
        ", ".join(f"{name.replace('_', ' ')} {conditions[name]}" for name in what),
        "",
        f"| mode | step | against {first} | peak memory | less than {first} |",
        "|---|---|---|---|---|",
    ]
    for mode, row in modes.items():
        sizes = [f"{row[name] / 2**30:.2f} GiB" for name in ("memory_bytes", "saved_bytes")]
        lines.append(f"| {mode} | {row['step_seconds']:.3f} s | {row['time_ratio']:.3f} | {' | '.join(sizes)} |")
    if result["failed"]:
        lines += ["", *(f"{reason}." for reason in result["failed"].values())]
    if result["part"]:
        lines += ["", f"Losses differ from those of {first}: {', '.join(result['part'])}"]
    return "\n".join(lines) + "\n"


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    options = read_options(arguments)
    result = benchmark(options)
    print(page(result))
    return 3 if result["part"] or result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
