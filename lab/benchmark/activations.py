"""Step time against peak memory for each mode of activation checkpointing: the same work, in turn, as real jobs.

    python -m lab.benchmark.activations --config config/recipes/demo.yaml [--rounds 3] [--steps 10]
        [--modes none,ops,attention,selective:4,selective:2,full,full:reentrant] [--processes 2] [--out FOLDER]
        [key.sub=value ...]

A mode is a value of model.activation_checkpointing, with `:4` for model.checkpointing_every, `:1.5` for
model.activation_memory_gib of budget, or `:reentrant`. On a CPU memory is the resident set of the largest rank, and
glibc is told to return what is freed (MALLOC_MMAP_THRESHOLD_). The folder gets `activations.json` and `activations.md`,
logs and runs. Exit code 0; 3: losses differ, which recomputing must not cause, or a mode failed; 2: it cannot be
done.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from config.cli import entry_point
from config.command_line import read_command_line
from config.launcher import as_launched
from lab.benchmark.contestants import COMMON_OVERRIDES
from lab.benchmark.harness import ALL_HOLD, FAILED, Jobs, Report, Run, conditions, in_rounds, in_words, job_options
from lab.benchmark.report import loss_difference
from launch.job import default_processes
from tracking.pages import markdown
from tracking.pages.markdown import Table

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
    parser = job_options("lab.benchmark.activations", __doc__, rounds=3, steps=10)
    parser.add_argument("--modes", default=MODES, help="separated by commas; compared with the first")
    return parser.parse_intermixed_args(arguments)


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Run all modes, compare them, and write the report; the content of activations.json. Raises UserError."""
    modes, processes = options.modes.split(","), options.processes or default_processes()
    common = ["--config", options.config, *options.overrides, *COMMON_OVERRIDES]
    common += [f"run.steps={options.steps + WARM_UP}", "schedule.warmup_steps=1"]
    arguments = {mode: [*common, *overrides_of(mode)] for mode in modes}
    resolved = [read_command_line(each, as_launched(processes)) for each in arguments.values()][0]
    report = Report(options.out, "activations", page)
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    counts = {"rounds": options.rounds, "steps": options.steps}
    about = conditions("lab.benchmark.activations", resolved, processes, **counts)
    jobs = Jobs(report.folder, processes, WARM_UP)
    failed: dict[str, str] = {}
    result: dict[str, Any] = {}
    for runs in in_rounds(modes, options.rounds, lambda mode, label: jobs.train(arguments[mode], label), failed, tell):
        first = next(iter(runs.values()))
        rows = {mode: summary(mine, first) for mode, mine in runs.items()}
        differ = [mode for mode, row in rows.items() if row["loss_difference"] > TOLERANCE[resolved.compute]]
        result = report.write({"modes": rows, "part": differ, "failed": failed, "conditions": about})
    return result


def tell(run: Run) -> str:
    """One line about a run: step time and memory."""
    return f"{median(run.steps):8.3f} s a step, {run.result.memory_bytes / 2**30:6.2f} GiB"


def summary(runs: Sequence[Run], first: Sequence[Run]) -> dict[str, Any]:
    """Medians over a mode's runs, and of their ratios to the first measured mode's runs, round by round."""
    pairs = list(zip(runs, first, strict=False))
    return {
        "step_seconds": median(median(run.steps) for run in runs),
        "time_ratio": median(median(run.steps) / median(other.steps) for run, other in pairs),
        "memory_bytes": median(run.result.memory_bytes for run in runs),
        "saved_bytes": median(other.result.memory_bytes - run.result.memory_bytes for run, other in pairs),
        "loss_difference": max(loss_difference(run.result.losses, first[0].result.losses) for run in runs),
        "runs": [
            {"seconds": run.steps, "losses": run.result.losses, "memory_bytes": run.result.memory_bytes} for run in runs
        ],
    }


def page(result: Mapping[str, Any]) -> str:
    """activations.md."""
    about, modes = result["conditions"], result["modes"]
    first = next(iter(modes))
    rows = [
        (
            *(mode, f"{row['step_seconds']:.3f} s", f"{row['time_ratio']:.3f}"),
            *(f"{row[name] / 2**30:.2f} GiB" for name in ("memory_bytes", "saved_bytes")),
        )
        for mode, row in modes.items()
    ]
    table = Table(["mode", "step", f"against {first}", "peak memory", f"less than {first}"], rows)
    notes = [f"{reason}." for reason in result["failed"].values()]
    notes += [f"Losses differ from those of {first}: {', '.join(result['part'])}"] if result["part"] else []
    title = "# Activation checkpointing: time against memory"
    return markdown.page(title, f"`{about['command']}`", in_words(about), table, "\n".join(notes))


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    result = benchmark(read_options(arguments))
    print(page(result))
    return FAILED if result["part"] or result["failed"] else ALL_HOLD


if __name__ == "__main__":
    sys.exit(main())
