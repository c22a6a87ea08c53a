"""Mantissa compared with other training loops: the same work, in turn, as real jobs.

    python -m lab.benchmark --config config/recipes/benchmark.yaml [--rounds 5] [--steps 30] [--out runs/benchmark]
        [--contestants mantissa,bare,accelerate,trainer,trl,torchtitan] [--at-least mantissa/bare=0.99]
        [key.sub=value ...]

docs/performance.md has the contestants. All start from the same weights and train on the same tokens in the same order,
with the same learning rates and the same resolved DeepSpeed JSON (translated for torchtitan). Each round runs every
contestant once, in an order that is reversed from round to round; ratios are taken round by round, and a contestant
whose losses differ gets none. With parallel.tensor only mantissa and bare take part. task: sft (with data.packing=none)
is trained by mantissa, trainer and trl, task: dpo by mantissa and trl, both with or without an adapter; each pads
batches in its own way.

The folder gets `benchmark.json` and `benchmark.md`, rewritten after every run, logs and results. A contestant whose job
fails is left out of later rounds, and the report says why. Exit code 0; 3: losses differ, a contestant failed, or a
bound of --at-least is not met; 2: not possible.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from config.batch import refuse_sharing
from config.cli import entry_point
from config.command_line import read_command_line
from config.errors import UserError
from config.launcher import as_launched
from config.options import positive_int, positive_number
from config.resolved import Resolved
from config.schema import Config
from lab.benchmark.contestants import COMMON_OVERRIDES, PRECISIONS, Run, Runner, parted, read_names, unavailable_reason
from lab.benchmark.harness import ALL_HOLD, FAILED, Report, conditions, in_own_process, in_rounds, job_options
from lab.benchmark.report import TOLERANCE, bound, compare, page
from lab.benchmark.spec import prepare_work
from launch.job import default_processes, shorten

DEFAULT_CONTESTANTS = "mantissa,bare,accelerate,trainer,trl,torchtitan"
"""Default contestants; those that are not installed are skipped, with the reason."""


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises UserError."""
    parser = job_options("lab.benchmark", __doc__, rounds=5, steps=30)
    parser.add_argument("--contestants", default=DEFAULT_CONTESTANTS, help="names, separated by commas")
    parser.add_argument("--warm-up", type=positive_int, default=5, help="steps before them that are not timed")
    parser.add_argument("--at-least", action="append", default=[], metavar="A/B=RATIO", help="bound on tokens/s")
    parser.add_argument("--loss-tolerance", type=positive_number, help=f"relative; default {TOLERANCE}")
    parser.add_argument("--peak-tflops", type=positive_number, help="of one device, for MFU; default: measured here")
    return parser.parse_intermixed_args(arguments)


def read_bounds(
    texts: Sequence[str], contestants: Sequence[str], skipped: Mapping[str, str]
) -> list[tuple[str, str, float]]:
    """`A/B=RATIO` as (A, B, RATIO). skipped: contestants that are skipped, with the reason.

    Raises UserError for any other form, or a name that does not take part.
    """
    bounds = []
    for text in texts:
        names, _, value = text.partition("=")
        first, _, second = names.partition("/")
        try:
            bounds.append((first, second, float(value)))
        except ValueError:
            raise UserError(f"--at-least {text}: is not of the form mantissa/bare=0.99") from None
        for name in (first, second):
            if name not in contestants:
                why = f": {skipped[name]}" if name in skipped else "; name it in --contestants"
                raise UserError(f"--at-least {text}: {name or 'no name'} takes no part{why}")
    return bounds


def resolve(options: argparse.Namespace, processes: int) -> tuple[Resolved, tuple[str, ...]]:
    """The run config that all contestants train, and train.py's arguments for it. Raises UserError."""
    launched, steps = as_launched(processes), options.steps + options.warm_up
    arguments = ["--config", options.config, *options.overrides]
    arguments += shorten(read_command_line([*arguments, *COMMON_OVERRIDES], launched).config, steps)
    resolved = read_command_line([*arguments, *COMMON_OVERRIDES], launched)
    refuse_sharing(resolved.batch, but=("tensor",), why="the contestants have {what} on each rank")
    _require_shared(options.config, resolved.config)
    if resolved.config.faults:
        raise UserError(f"{options.config}: faults have no place in a benchmark; remove them")
    return resolved, tuple(arguments)


def _require_shared(file: str, config: Config) -> None:
    """Raise UserError for a task, or a setting of one, that only Mantissa has."""
    task, sft, preference = config.task, config.sft, config.preference
    for key, value, shared, concerned in (
        ("task", task, ("pretrain", "sft", "dpo"), True),
        ("precision.path", config.precision.path, ("cast",), True),
        ("model.activation_checkpointing", config.model.activation_checkpointing, ("none", "full"), True),
        ("data.document_masking", config.data.document_masking, (False,), True),
        ("data.sources", len(config.data.sources), (0,), True),
        ("data.packing", config.data.packing, ("none",), task == "sft"),
        ("sft.loss", sft.loss, ("token",), task == "sft"),
        ("sft.neftune_alpha", sft.neftune_alpha, (0.0,), task == "sft"),
        ("preference.loss", preference.loss, ("sigmoid",), task == "dpo"),
        ("preference.label_smoothing", preference.label_smoothing, (0.0,), task == "dpo"),
        ("preference.sft_weight", preference.sft_weight, (0.0,), task == "dpo"),
        ("adapter.kind", config.adapter.kind, ("none",), task == "pretrain"),
        ("adapter.dropout", config.adapter.dropout, (0.0,), True),
        ("adapter.base", config.adapter.base, ("compute",), True),
    ):
        if concerned and value not in shared:
            wanted = " or ".join(map(str, shared))
            raise UserError(f"{file}: {key} = {value} would not be the same for all contestants; set {wanted}")


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Run and compare all contestants, and write the report; returns benchmark.json's content. Raises UserError."""
    contestants, skipped = parted(read_names(options.contestants), unavailable_reason, "run here")
    read_bounds(options.at_least, contestants, skipped)
    processes = options.processes or default_processes()
    resolved, arguments = resolve(options, processes)
    report = Report(options.out, "benchmark", page)
    report.remove("results", "weights", "rows", "tokens.npy", "spec.json")
    # in its own process: it takes the model's memory, and on a GPU machine some of a GPU's
    spec = in_own_process(prepare_work, resolved, report.folder, warm_up=options.warm_up)
    runner = Runner(report.folder, processes, arguments, spec)
    contestants, unsupported = parted(contestants, runner.refusal, "train this")
    skipped |= unsupported
    for name, reason in skipped.items():
        print(f"{name} takes no part: {reason}", flush=True)
    bounds = read_bounds(options.at_least, contestants, skipped)
    peak: dict[str, Any] | None = None
    if options.peak_tflops and spec.flops_per_token is not None:
        peak = {"flops": options.peak_tflops * 1e12 * processes, "how": "--peak-tflops x processes"}
    elif spec.flops_per_token is not None:
        peak = runner.peak()
    lower = not PRECISIONS.keys().isdisjoint(contestants)
    measures: dict[str, Any] = {
        "tokens": spec.tokens_per_step,
        "flops_per_token": spec.flops_per_token,
        "peak": peak and peak["flops"],
        "tolerance": options.loss_tolerance or TOLERANCE["bf16" if lower else resolved.compute],
    }
    config = resolved.config
    about = conditions(
        "lab.benchmark",
        resolved,
        processes,
        model=config.model.name_or_path or config.model.architecture,
        task=config.task,
        adapter="" if config.adapter.kind == "none" else f" by {config.adapter.kind} of rank {config.adapter.r}",
        parameters=spec.parameters,
        tokens=spec.tokens_per_step,
        batch=dataclasses.asdict(resolved.batch),
        rounds=options.rounds,
        timed_steps=options.steps,
        warm_up=options.warm_up,
    )
    failed: dict[str, str] = {}
    found: dict[str, Any] = {}
    for runs in in_rounds(contestants, options.rounds, runner.run, failed, tell):
        found = compare(runs, **measures)
        found |= {"peak": peak, "flops_per_token": spec.flops_per_token, "passed_over": skipped, "failed": failed}
        found |= {"bounds": [bound(found, *each) for each in bounds], "conditions": about}
        found = report.write(found)
    return found


def tell(run: Run) -> str:
    """One line about a run: step time, start-up and loss."""
    seconds, loss = run.first_step_seconds, run.result.losses[-1]
    return f"{run.step_seconds * 1e3:9.1f} ms a step, first step after {seconds:.1f} s, loss {loss:.4f}"


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    options = read_options(arguments)
    found = benchmark(options)
    print(f"\n{page(found)}\nreport   {options.out / 'benchmark.md'}")
    same = not found["failed"] and all(mine["trains_the_same"] for mine in found["contestants"].values())
    return ALL_HOLD if same and all(check["holds"] for check in found["bounds"]) else FAILED
