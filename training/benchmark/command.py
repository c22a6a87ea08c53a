"""Mantissa against the loops its users would write: the same work, in turn, as real jobs.

    python -m training.benchmark --config config/recipes/benchmark.yaml [--rounds 5] [--steps 30] [--out runs/benchmark]
        [--contestants mantissa,bare,accelerate,trainer,torchtitan] [--at-least mantissa/bare=0.99] [key.sub=value ...]

Contestants: mantissa (as the config has it), mantissa-full (telemetry, spike detection and Prometheus as well),
mantissa-off (no wandb, a silent console), bare (`deepspeed.initialize` and a loop), accelerate and trainer (Hugging
Face, both on DeepSpeed), torchtitan and torchtitan-compile (its own Trainer, on FSDP2, where it is installed);
mantissa-fp32, -bf16, -fp16 and -manifest are Mantissa in that precision, whatever the config says, mantissa-torch,
-liger and -compile with those kernels. All start from the same weights and see the same
tokens in the same order, under the same learning rates and the same resolved DeepSpeed JSON (torchtitan: what it says,
in torchtitan's terms). Each round runs every contestant once, in an order that is reversed from round to round; ratios
are taken round by round, so that a machine whose speed drifts disturbs all alike. Losses are compared, too: who trains
something else gets no ratio.

The folder gets `benchmark.json` and `benchmark.md`, logs and results. Exit code 0; 3: losses part, or a bound of
--at-least fails; 2: it cannot be done. What Mantissa adds to a step is
measured by `training.benchmark.overhead`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from config.cli import CONFIG_ERROR, Arguments
from config.command_line import read_command_line
from config.errors import UserError
from config.launcher import as_launched
from config.resolved import Resolved
from tracking.environment import environment
from tracking.jsonl import plain
from training.benchmark.contestants import ALIKE, PRECISIONS, WITHOUT_SPLIT, Field, Run, choose, pass_over
from training.benchmark.report import bound, compare, page
from training.benchmark.spec import Work, prepare_work
from training.jobs import default_processes

ALL_HOLD, FAILED = 0, 3
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "fp16": 5e-3}
"""Largest relative difference of a step's loss, by dtype of forward and backward."""
EVERYBODY = "mantissa,bare,accelerate,trainer,torchtitan"
"""Who takes part unless others are named; who is not installed is passed over, with the reason."""
OURS = ("logs", "results", "runs", "weights", "tokens.npy", "spec.json", "spec-split.json")
"""What an earlier benchmark leaves in the folder, and the next one replaces."""


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises UserError."""
    parser = Arguments(
        prog="python -m training.benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="run config that says what is trained")
    parser.add_argument("--contestants", default=EVERYBODY, help="who, separated by commas")
    parser.add_argument("--rounds", type=int, default=5, help="how often each of them runs")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of a run")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before them that are not timed")
    parser.add_argument("--processes", type=int, help="processes of each job (default: one a GPU, two without)")
    parser.add_argument(
        "--launch", default="", help="launcher, such as 'deepspeed --hostfile hosts'; default: torchrun"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"), help="folder of the report")
    parser.add_argument(
        "--at-least", action="append", default=[], metavar="A/B=RATIO", help="bound on tokens/s; exit 3"
    )
    parser.add_argument("--loss-tolerance", type=float, help=f"relative; default {TOLERANCE}")
    parser.add_argument("--peak-tflops", type=float, help="of one device, for MFU; default: measured here")
    parser.add_argument("--no-split", action="store_true", help="leave out the watched runs that split a step's time")
    parser.add_argument("overrides", nargs="*", help="key.sub=value")
    options = parser.parse_intermixed_args(arguments)
    for name, least in (("rounds", 1), ("steps", 1), ("warm_up", 1)):
        if getattr(options, name) < least:
            raise UserError(f"--{name.replace('_', '-')} = {getattr(options, name)}: has to be {least} or more")
    for name in ("peak_tflops", "loss_tolerance"):
        value = getattr(options, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"--{name.replace('_', '-')} = {value}: has to be a number above 0")
    if options.processes is not None and options.processes < 1:
        raise UserError(f"--processes = {options.processes}: has to be 1 or more")
    return options


def read_bounds(
    texts: Sequence[str], contestants: Sequence[str], passed: Mapping[str, str]
) -> list[tuple[str, str, float]]:
    """`A/B=RATIO` as (A, B, RATIO). passed: those who are passed over, with the reason.

    Raises UserError: another form, or someone who takes no part.
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
                why = f": {passed[name]}" if name in passed else "; name it in --contestants"
                raise UserError(f"--at-least {text}: {name or 'nobody'} takes no part{why}")
    return bounds


def resolve(options: argparse.Namespace, processes: int) -> tuple[Resolved, tuple[str, ...]]:
    """The run config of all, and the arguments for train.py that have it. Raises UserError."""
    here, steps = as_launched(processes), options.steps + options.warm_up
    arguments = ["--config", options.config, *options.overrides]
    whole = read_command_line([*arguments, *ALIKE], here).config
    warmup = math.ceil(whole.schedule.warmup_steps * steps / whole.run.steps)
    arguments += [f"run.steps={steps}", f"schedule.warmup_steps={warmup}"]
    resolved = read_command_line([*arguments, *ALIKE], here)
    if resolved.config.precision.path != "cast":
        raise UserError(f"{options.config}: precision.path = manifest is Mantissa's alone; the others have only cast")
    if resolved.config.model.activation_checkpointing not in ("none", "full") or resolved.config.data.document_masking:
        problem = "model.activation_checkpointing other than none and full, and data.document_masking, are"
        raise UserError(f"{options.config}: {problem} Mantissa's alone; set what the others have, too")
    if resolved.config.faults or resolved.config.defects:
        raise UserError(f"{options.config}: faults and defects have no place in a benchmark; remove them")
    return resolved, tuple(arguments)


def run_rounds(field: Field, contestants: Sequence[str], rounds: int) -> dict[str, list[Run]]:
    """Every contestant once a round, the order reversed in every other one."""
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    for number in range(1, rounds + 1):
        for name in contestants if number % 2 else reversed(contestants):
            run = field.run(name, f"{name}-{number}")
            runs[name].append(run)
            print(
                f"round {number}  {name:<13} {run.step_seconds * 1e3:9.1f} ms a step, first step after "
                f"{run.first_step_seconds:.1f} s, loss {run.result.losses[-1]:.4f}",
                flush=True,
            )
    return runs


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Run all, compare, and write the report; the content of benchmark.json. Raises UserError."""
    contestants, passed = choose(options.contestants)
    bounds = read_bounds(options.at_least, contestants, passed)
    processes = options.processes or default_processes()
    resolved, arguments = resolve(options, processes)
    folder = options.out.expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in OURS:
        shutil.rmtree(folder / name, ignore_errors=True) if (folder / name).is_dir() else (folder / name).unlink(True)
    # in a process of its own: it takes the model's memory, and on a GPU machine a share of a GPU's
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
        work = apart.submit(prepare_work, resolved, folder, warm_up=options.warm_up).result()
    contestants, unfit = pass_over(contestants, work.spec)
    passed |= unfit
    for name, reason in passed.items():
        print(f"{name} takes no part: {reason}", flush=True)
    bounds = read_bounds(options.at_least, contestants, passed)
    field = Field(folder, arguments, processes, tuple(shlex.split(options.launch)), work.spec)
    if options.peak_tflops is None:
        peak = field.peak()
    else:
        peak = {"flops": options.peak_tflops * 1e12 * processes, "how": "--peak-tflops x processes"}
    runs = run_rounds(field, contestants, options.rounds)
    lower = not PRECISIONS.keys().isdisjoint(contestants)
    tolerance = options.loss_tolerance or TOLERANCE["bf16" if lower else resolved.compute]
    tokens = resolved.tokens_per_step
    found = compare(runs, tokens=tokens, flops_per_token=work.flops_per_token, peak=peak["flops"], tolerance=tolerance)
    if not options.no_split:
        for name in (name for name in contestants if name not in WITHOUT_SPLIT):
            found["contestants"][name]["split"] = field.split(name)
    found |= {"peak": peak, "flops_per_token": work.flops_per_token, "passed_over": passed}
    found["bounds"] = [bound(found, *each) for each in bounds]
    found["conditions"] = _conditions(options, resolved, work, processes)
    found = plain(found)
    (folder / "benchmark.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "benchmark.md").write_text(page(found))
    return found


def _conditions(options: argparse.Namespace, resolved: Resolved, work: Work, processes: int) -> dict[str, Any]:
    config = resolved.config
    return {
        "model": config.model.name_or_path or config.model.architecture,
        "parameters": work.parameters,
        "zero_stage": resolved.zero_stage,
        "offload": resolved.offload,
        "compute": resolved.compute,
        "processes": processes,
        "tokens": resolved.tokens_per_step,
        "batch": dataclasses.asdict(resolved.batch),
        "rounds": options.rounds,
        "timed_steps": options.steps,
        "warm_up": options.warm_up,
        "environment": environment({"device": _device()}),
    }


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    try:
        options = read_options(arguments)
        found = benchmark(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return CONFIG_ERROR
    print(f"\n{page(found)}\nreport   {options.out / 'benchmark.md'}")
    same = all(mine["trains_the_same"] for mine in found["contestants"].values())
    return ALL_HOLD if same and all(check["holds"] for check in found["bounds"]) else FAILED
