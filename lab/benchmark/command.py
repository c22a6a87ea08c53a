"""Mantissa compared with other training loops: the same work, in turn, as real jobs.

    python -m lab.benchmark --config config/recipes/benchmark.yaml [--rounds 5] [--steps 30] [--out runs/benchmark]
        [--contestants mantissa,bare,accelerate,trainer,trl,torchtitan] [--at-least mantissa/bare=0.99]
        [key.sub=value ...]

Contestants: mantissa (as the config has it), mantissa-full (telemetry, spike detection and Prometheus as well),
mantissa-off (no wandb, a silent console), bare (`deepspeed.initialize` and a loop), accelerate and trainer (Hugging
Face, both on DeepSpeed), trl (its SFTTrainer and DPOTrainer on DeepSpeed, where it is installed), torchtitan and
torchtitan-compile (its own Trainer, on FSDP2, where it is installed); mantissa-fp32, -bf16, -fp16 and -manifest are
Mantissa in that precision, whatever the config's, mantissa-torch, -liger and -compile with those kernels. All start
from the same weights and train on the same tokens in the same order, with the same learning rates and the same resolved
DeepSpeed JSON (translated for torchtitan). Each round runs every contestant once, in an order that is reversed from
round to round; ratios are taken round by round, so that a machine whose speed drifts disturbs all alike. Losses are
compared, too: contestants whose losses differ get no ratio.

With parallel.tensor it is mantissa and bare, whose loop is DeepSpeed's AutoTP; the others share no matrices.

task: sft (with data.packing=none) is trained by mantissa, trainer and trl, task: dpo by mantissa and trl, both with or
without an adapter. All get the same tokens and labels and the same first values of the adapter; each pads its batches
as it does. Such steps are not split by stage.

The folder gets `benchmark.json` and `benchmark.md`, written anew after every run, logs and results. A contestant whose
job fails is left out of the rounds that follow, and the report says why. Exit code 0; 3: losses differ, a contestant
failed, or a bound of --at-least does; 2: it cannot be done. What Mantissa adds to a step is measured by
`lab.benchmark.overhead`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from config.batch import refuse_sharing
from config.cli import Arguments, entry_point, positive_int, positive_number
from config.command_line import read_command_line
from config.errors import UserError
from config.files import write_atomically
from config.launcher import as_launched
from config.resolved import Resolved
from config.schema import Config
from lab.benchmark.contestants import (
    COMMON_OVERRIDES,
    OWN,
    PRECISIONS,
    WITHOUT_SPLIT,
    Run,
    Runner,
    choose,
    skip_unsupported,
)
from lab.benchmark.report import bound, compare, page
from lab.benchmark.spec import Work, prepare_work
from launch.job import add_processes_option, default_processes, in_turn, shorten
from tracking.environment import environment
from tracking.jsonl import plain

ALL_HOLD, FAILED = 0, 3
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "fp16": 5e-3}
"""Largest relative difference of a step's loss, by dtype of forward and backward."""
DEFAULT_CONTESTANTS = "mantissa,bare,accelerate,trainer,trl,torchtitan"
"""Contestants unless others are named; those that are not installed are skipped, with the reason."""
EARLIER_RESULTS = (
    *("logs", "results", "runs", "weights", "rows", "tokens.npy", "spec.json", "spec-split.json"),
    *("benchmark.json", "benchmark.md"),
)
"""Left in the folder by an earlier benchmark, and replaced by the next one."""


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises UserError."""
    parser = Arguments("python -m lab.benchmark", __doc__)
    parser.add_argument("--config", required=True, help="run config to train")
    parser.add_argument("--contestants", default=DEFAULT_CONTESTANTS, help="names, separated by commas")
    parser.add_argument("--rounds", dest="repeats", type=positive_int, default=5, help="how often each of them runs")
    parser.add_argument("--steps", type=positive_int, default=30, help="timed steps of a run")
    parser.add_argument("--warm-up", type=positive_int, default=5, help="steps before them that are not timed")
    add_processes_option(parser)
    parser.add_argument(
        "--launch", default="", help="launcher, such as 'deepspeed --hostfile hosts'; default: torchrun"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"), help="folder of the report")
    parser.add_argument(
        "--at-least", action="append", default=[], metavar="A/B=RATIO", help="bound on tokens/s; exit 3"
    )
    parser.add_argument("--loss-tolerance", type=positive_number, help=f"relative; default {TOLERANCE}")
    parser.add_argument("--peak-tflops", type=positive_number, help="of one device, for MFU; default: measured here")
    parser.add_argument("--no-split", action="store_true", help="leave out the runs that time a step by stage")
    parser.add_argument("overrides", nargs="*", help="key.sub=value")
    return parser.parse_intermixed_args(arguments)


def read_bounds(
    texts: Sequence[str], contestants: Sequence[str], skipped: Mapping[str, str]
) -> list[tuple[str, str, float]]:
    """`A/B=RATIO` as (A, B, RATIO). skipped: those who are skipped, with the reason.

    Raises UserError: another form, or a name that does not take part.
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
    if resolved.config.precision.path != "cast":
        raise UserError(f"{options.config}: precision.path = manifest is only Mantissa's; the others have only cast")
    if resolved.config.model.activation_checkpointing not in ("none", "full") or resolved.config.data.document_masking:
        problem = "model.activation_checkpointing other than none and full, and data.document_masking, are"
        raise UserError(f"{options.config}: {problem} only Mantissa's; set what the others have, too")
    _require_shared(options.config, resolved.config)
    if resolved.config.faults:
        raise UserError(f"{options.config}: faults have no place in a benchmark; remove them")
    return resolved, tuple(arguments)


def _require_shared(file: str, config: Config) -> None:
    """Raise UserError for a task, or a setting of one, that only Mantissa has."""
    if config.task not in ("pretrain", "sft", "dpo"):
        raise UserError(f"{file}: task = {config.task} is not what the contestants train; choose pretrain, sft or dpo")
    if config.data.sources or (config.task == "pretrain" and config.adapter.kind != "none"):
        raise UserError(f"{file}: data.sources, and an adapter of task pretrain, are only Mantissa's; remove them")
    if config.task == "sft" and config.data.packing != "none":
        raise UserError(f"{file}: data.packing = {config.data.packing} packs as only Mantissa does; set none")
    own = {
        "sft.loss": ("sft", config.sft.loss, "token"),
        "sft.neftune_alpha": ("sft", config.sft.neftune_alpha, 0.0),
        "preference.loss": ("dpo", config.preference.loss, "sigmoid"),
        "preference.label_smoothing": ("dpo", config.preference.label_smoothing, 0.0),
        "preference.sft_weight": ("dpo", config.preference.sft_weight, 0.0),
        "adapter.dropout": (config.task, config.adapter.dropout, 0.0),
        "adapter.base": (config.task, config.adapter.base, "compute"),
    }
    for key, (task, value, needed) in own.items():
        if task == config.task and value != needed:
            raise UserError(f"{file}: {key} = {value} would not be the same for all contestants; set {needed}")


def run_repeats(
    runner: Runner, contestants: Sequence[str], repeats: int, failed: dict[str, str]
) -> Iterator[dict[str, list[Run]]]:
    """Every contestant `repeats` times, in turn; after each run all so far, by contestant that has one.

    failed: is given those whose job failed, with the reason; their later rounds are left out. Raises UserError: the
    first reason, where no run at all succeeded.
    """
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    for number, name in in_turn(contestants, repeats):
        if name in failed:
            continue
        try:
            run = runner.run(name, f"{name}-{number}")
        except UserError as error:
            failed[name] = str(error)
            print(f"round {number}  {name:<13} {error}", flush=True)
        else:
            runs[name].append(run)
            print(
                f"round {number}  {name:<13} {run.step_seconds * 1e3:9.1f} ms a step, first step after "
                f"{run.first_step_seconds:.1f} s, loss {run.result.losses[-1]:.4f}",
                flush=True,
            )
        if any(runs.values()):
            yield {name: mine for name, mine in runs.items() if mine}
    if not any(runs.values()):
        raise UserError(next(iter(failed.values())))


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Run all contestants, compare them, and write the report; the content of benchmark.json. Raises UserError."""
    contestants, skipped = choose(options.contestants)
    bounds = read_bounds(options.at_least, contestants, skipped)
    processes = options.processes or default_processes()
    resolved, arguments = resolve(options, processes)
    folder = options.out.expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in EARLIER_RESULTS:
        shutil.rmtree(folder / name, ignore_errors=True) if (folder / name).is_dir() else (folder / name).unlink(True)
    # in a process of its own: it takes the model's memory, and on a GPU machine a share of a GPU's
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        work = process.submit(prepare_work, resolved, folder, warm_up=options.warm_up).result()
    runner = Runner(folder, arguments, processes, tuple(shlex.split(options.launch)), work.spec)
    refused = {name: reason for name in contestants if name in OWN and (reason := runner.refusal(name)) is not None}
    contestants, unsupported = skip_unsupported(contestants, work.spec, refused=refused)
    skipped |= unsupported
    for name, reason in skipped.items():
        print(f"{name} takes no part: {reason}", flush=True)
    bounds = read_bounds(options.at_least, contestants, skipped)
    peak: dict[str, Any] | None = None
    if work.flops_per_token is not None and options.peak_tflops is None:
        peak = runner.peak()
    elif work.flops_per_token is not None:
        peak = {"flops": options.peak_tflops * 1e12 * processes, "how": "--peak-tflops x processes"}
    lower = not PRECISIONS.keys().isdisjoint(contestants)
    tolerance = options.loss_tolerance or TOLERANCE["bf16" if lower else resolved.compute]
    tokens, flops = work.tokens_per_step, None if peak is None else peak["flops"]
    conditions = _conditions(options, resolved, work, processes)
    failed: dict[str, str] = {}
    splits: dict[str, Any] = {}

    def written(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
        """The report of these runs. Written anew after each of them: what ends this process may come without notice."""
        found = compare(runs, tokens=tokens, flops_per_token=work.flops_per_token, peak=flops, tolerance=tolerance)
        for name, split in splits.items():
            found["contestants"][name]["split"] = split
        found |= {"peak": peak, "flops_per_token": work.flops_per_token, "passed_over": skipped, "failed": failed}
        found |= {"bounds": [bound(found, *each) for each in bounds], "conditions": conditions}
        found = plain(found)
        write_atomically(folder / "benchmark.json", (json.dumps(found, indent=1) + "\n").encode())
        write_atomically(folder / "benchmark.md", page(found).encode())
        return found

    runs: dict[str, list[Run]] = {}
    for runs in run_repeats(runner, contestants, options.repeats, failed):
        found = written(runs)
    if not options.no_split and work.spec.task == "pretrain":
        for name in (name for name in contestants if name not in {*WITHOUT_SPLIT, *failed}):
            splits[name] = runner.split(name)
        found = written(runs)
    return found


def _conditions(options: argparse.Namespace, resolved: Resolved, work: Work, processes: int) -> dict[str, Any]:
    config = resolved.config
    return {
        "model": config.model.name_or_path or config.model.architecture,
        "task": config.task,
        "adapter": "" if config.adapter.kind == "none" else f" by {config.adapter.kind} of rank {config.adapter.r}",
        "parameters": work.parameters,
        "zero_stage": resolved.zero_stage,
        "offload": resolved.offload,
        "compute": resolved.compute,
        "processes": processes,
        "tokens": work.tokens_per_step,
        "batch": dataclasses.asdict(resolved.batch),
        "rounds": options.repeats,
        "timed_steps": options.steps,
        "warm_up": options.warm_up,
        "environment": environment({"device": _device()}),
    }


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    options = read_options(arguments)
    found = benchmark(options)
    print(f"\n{page(found)}\nreport   {options.out / 'benchmark.md'}")
    same = not found["failed"] and all(mine["trains_the_same"] for mine in found["contestants"].values())
    return ALL_HOLD if same and all(check["holds"] for check in found["bounds"]) else FAILED
