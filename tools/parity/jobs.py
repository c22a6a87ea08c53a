"""The jobs behind a parity report: half-precision runs, their FP32 twins, and single steps compared."""

from __future__ import annotations

import importlib
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.errors import UserError
from config.json_text import json_sha256
from config.launcher import as_launched
from config.load import to_dict
from config.resolved import Resolved
from config.schema import SAMPLING_TASKS
from launch.canary.plan import in_fp32
from launch.forks import Forks
from launch.job import (
    NO_STORE,
    TRAIN,
    default_processes,
    error_line_of,
    first_line,
    job_command,
    launch,
    processes_of,
    shorten,
    visible_gpus,
    with_steps,
)
from tools.parity.energy import joules, used
from tools.parity.every_step import seldom, settings
from tools.parity.judge_runs import NUDGE, Trajectory, rounding_to, settling_of
from tools.parity.judge_steps import COMPARED, RECORDED, Walk, lengths
from tracking.compare.surviving import read_events, surviving
from tracking.environment import git_state
from tracking.jsonl import Follower
from tracking.numbers import duration
from tracking.run_dir import RunDir
from tracking.run_facts import RunFacts
from tracking.summary import read_inputs, read_run

TWIN = "fp32-"
"""Prefix of the names of the FP32 runs."""
WALK = 2
"""Applied steps compared at the first point and the last, one at those between: the first step shows wrong computation,
the second a wrong state after the first."""

UNTRACKED = ("tracking.sinks=[]", "tracking.prometheus_port=null", "tracking.otlp_endpoint=null")
"""Overrides that keep the gate's jobs out of the trackers of the user's own run."""
FEW_STEPS = 30
"""Length of a run below which two points are compared by default."""


@dataclass(frozen=True)
class Plan:
    """The runs to perform, and their folder."""

    arguments: tuple[str, ...]
    """`--config FILE` and the user's overrides, for train.py."""
    resolved: Resolved
    """The half-precision run."""
    folder: Path
    processes: int
    launcher: tuple[str, ...]
    watching: tuple[str, ...] = ()
    """Overrides that make the half-precision run compare each of its steps."""
    forks: Forks | None = None
    """Where the ranks come from; None: each job is started anew."""
    twin: Resolved | None = None
    """The FP32 run; None for a task whose runs sample other answers."""

    @cached_property
    def inputs(self) -> str:
        """A hash over config, DeepSpeed JSON and manifest, which may change under the same command."""
        config = self.resolved.config
        manifest = config.precision.manifest and (REPOSITORY / config.precision.manifest).read_text(encoding="utf-8")
        return json_sha256([to_dict(config), self.resolved.deepspeed, manifest], sort_keys=True)

    @cached_property
    def gpus(self) -> list[str]:
        """This machine's GPUs that its ranks use, if no launcher starts them elsewhere."""
        return visible_gpus()[: self.processes]

    @property
    def seeds(self) -> list[int]:
        """The seeds of the runs that are compared."""
        return [self.resolved.config.run.seed + index for index in range(self.resolved.config.parity.seeds)]

    @property
    def points(self) -> list[int]:
        """Attempted steps after which single steps are compared: 0, then one in each further equal part of the run.

        Random, so that another `parity.draw` can hit a defect that spares these steps. WALK steps remain after each.
        """
        config = self.resolved.config
        last = max(1, config.run.steps - WALK + 1)
        count = min(config.parity.points or (2 if config.run.steps < FEW_STEPS else 3), config.run.steps)
        ends = [max(1, last * part // count) for part in range(1, count + 1)]
        dice = random.Random(f"{config.parity.draw} {config.run.seed}")
        drawn = [dice.randrange(start, max(end, start + 1)) for start, end in pairwise(ends)]
        return sorted({0, *drawn})

    @property
    def evaluated(self) -> list[int]:
        """The point, drawn too, after which both runs evaluate; they also do at the end."""
        config = self.resolved.config
        dice = random.Random(f"evaluation {config.parity.draw} {config.run.seed}")
        return dice.sample(self.points[1:], k=min(1, len(self.points) - 1))


@dataclass(frozen=True)
class Run:
    """A finished job."""

    folder: RunDir
    finished: bool
    error_line: str
    energy: float | None

    @cached_property
    def facts(self) -> RunFacts:
        """Its events as columns."""
        return read_run(self.folder.path)


@dataclass(frozen=True)
class References:
    """Finished FP32 runs to compare with; any number of half-precision runs of the same job may share them."""

    twins: tuple[Run, ...]
    """One per seed."""
    controls: tuple[Run, ...]
    """The first seed with slightly larger learning rates: how far apart two sound runs end."""


def forks_for(processes: int | None, launcher: str) -> Forks | None:
    """The source of the jobs' ranks, with their imports; None with a launcher or a GPU. Arguments as in `plan`."""
    if launcher or visible_gpus():
        return None
    ours = "training.build", "training.finish", "training.loop", "training.session", "tools.parity.steps"
    for module in (*ours, "matplotlib.figure", "matplotlib.backends.backend_agg"):
        importlib.import_module(module)
    return Forks(processes or default_processes(), torch.set_num_threads)


def plan(
    config: str,
    overrides: Sequence[str],
    *,
    folder: Path,
    steps: int | None = None,
    processes: int | None = None,
    launcher: Sequence[str] = (),
    forks: Forks | None = None,
) -> Plan:
    """Resolve everything before a job starts, the FP32 twin too. Raises UserError for a wrong config or option."""
    processes = processes_of(launcher, processes)
    launched = as_launched(processes)
    arguments = ["--config", config, *overrides]
    resolved = read_command_line(arguments, launched)
    length = with_steps(resolved) if steps is None else shorten(resolved.config, steps)
    if length:
        arguments += length
        resolved = read_command_line(arguments, launched)
    watching = tuple(settings(arguments, launched, resolved.config.parity.whole_steps))
    twin = None
    if resolved.config.task not in SAMPLING_TASKS:
        with tempfile.TemporaryDirectory() as scratch:
            twin = read_command_line([*arguments, *_in_fp32(resolved, Path(scratch))], launched)
    return Plan(tuple(arguments), resolved, folder, processes, tuple(launcher), watching, forks, twin)


def train_references(chosen: Plan) -> References:
    """Train the FP32 runs; none for a task whose runs sample other answers. Raises UserError if one fails."""
    if chosen.twin is None:
        return References((), ())
    twins = tuple(train_twin(chosen, seed) for seed in chosen.seeds)
    first, count = chosen.seeds[0], chosen.resolved.config.parity.controls
    return References(twins, tuple(train_twin(chosen, first, control=index) for index in range(count)))


def train_twin(
    chosen: Plan, seed: int, *, control: int | None = None, lost: Sequence[int] = (), a_bit: int | None = None
) -> Run:
    """Train the job in FP32. Raises UserError if it fails, since there is then nothing to compare with.

    control: its index, which sets a slightly different learning rate. lost: steps that are not applied.
    a_bit: draw of starting weights that differ by so little that only chaos makes it matter.
    """
    config, overrides = chosen.resolved.config, _in_fp32(chosen.resolved, chosen.folder)
    program: Sequence[str] = TRAIN
    if a_bit is not None:
        name, program = f"a-bit-apart-{a_bit + 1}", _a_bit_apart(chosen, a_bit)
    elif control is not None:
        factor = 1 + (-1) ** control * NUDGE * (control // 2 + 1)  # 1 + 2^-8, 1 - 2^-8, 1 + 2^-7 ...
        rate = config.optimizer.learning_rate * factor
        name, overrides = f"control-{control + 1}", [*overrides, f"optimizer.learning_rate={rate!r}"]
    elif lost:
        faults = ", ".join(f"{{kind: lost_update, step: {step}}}" for step in lost)
        name, overrides = f"without-{len(lost)}-seed-{seed}", [*overrides, f"faults=[{faults}]"]
    else:
        name = f"seed-{seed}"
        overrides += seldom(chosen.watching, config.parity.whole_steps)
        overrides += _saving(chosen) if seed == config.run.seed else []
    run = _train(chosen, TWIN + name, seed, overrides, program)
    if not run.finished:
        raise UserError(f"the FP32 twin failed: {run.error_line}; see {_log(chosen, run.folder.name)}")
    return run


def train_again(chosen: Plan, seed: int, draw: int) -> Run:
    """Train the half-precision job from weights that are perturbed as by rounding."""
    name = f"candidate-a-bit-apart-{draw + 1}"
    return _train(chosen, name, seed, ["checkpoint.every_steps=0"], _a_bit_apart(chosen, draw))


def _a_bit_apart(chosen: Plan, draw: int) -> tuple[str, ...]:
    """`train.py` starting from slightly different weights."""
    return ("-m", "tools.parity.alternatives", repr(rounding_to(chosen.resolved.config.precision)), str(draw))


def train_candidate(chosen: Plan, seed: int) -> Run:
    """Train the half-precision job. Raises UserError if it takes no step, as when activations exceed FP16 from the
    start; ending later is a finding."""
    run = _train(chosen, f"candidate-seed-{seed}", seed, [*chosen.watching, *_saving(chosen)])
    events = read_events(run.folder.events) if run.folder.events.exists() else ()
    if not run.finished and not any(event["event"] == "step" and event["applied"] for event in events):
        raise UserError(f"the run took no step: {run.error_line}; see {_log(chosen, run.folder.name)}")
    return run


def _in_fp32(resolved: Resolved, folder: Path) -> list[str]:
    """Overrides of the FP32 twin, whose DeepSpeed JSON is written into `folder`."""
    return [*in_fp32(resolved, folder), "model.kernels=torch", "checkpoint.every_steps=0", "faults=[]"]


def _saving(chosen: Plan) -> list[str]:
    """Settings that make a run save at every point, and evaluate at one."""
    points = chosen.points[1:]
    return [
        *("checkpoint.every_steps=0", f"checkpoint.also_after={points}", f"checkpoint.keep={len(points) + 2}"),
        f"evaluate.also_after={chosen.evaluated}",
    ]


def _train(chosen: Plan, name: str, seed: int, overrides: Sequence[str], program: Sequence[str] = TRAIN) -> Run:
    folder = RunDir(chosen.folder / "runs" / name)
    config = chosen.resolved.config
    program = [
        *program,
        *chosen.arguments,
        *(f"run.dir={folder.path.parent}", f"run.name={name}", f"run.seed={seed}", "run.resume=never"),
        f"evaluate.every_steps={config.evaluate.every_steps or config.run.steps}",
        *("telemetry.every_steps=0", "generate.tokens=0", *NO_STORE, *UNTRACKED),
        *overrides,
    ]
    output, energy = _log(chosen, name), None
    command = job_command(program, processes=chosen.processes, launcher=chosen.launcher)
    if _is_kept(chosen, folder, command):
        print(f"{name}: kept from an earlier start that ended before its verdict")
    else:
        if folder.path.exists():
            shutil.rmtree(folder.path)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_suffix(".inputs").write_text(chosen.inputs, encoding="utf-8")
        print(f"{name}: {config.run.steps} steps on {chosen.processes} processes")
        follower, steps = Follower(folder.events), [0]

        def done() -> int:
            steps.extend(event["step"] for event in follower.events("step"))
            return max(steps)

        before = _joules(chosen)
        _launch(chosen, program, output, f"{name}: step", done, config.run.steps)
        energy = used(before, _joules(chosen))
    events = read_events(folder.events) if folder.events.exists() else ()
    end: dict[str, Any] = next((event for event in reversed([*events]) if event["event"] == "run_end"), {})
    finished = end.get("exit_code") == 0
    return Run(folder, finished, "" if finished else end.get("reason") or error_line_of(output), energy)


def _joules(chosen: Plan) -> float | None:
    return None if chosen.launcher else joules(chosen.gpus)


def _is_kept(chosen: Plan, folder: RunDir, command: Sequence[str]) -> bool:
    """Whether a finished run of this command, commit and these inputs exists, with all checkpoints."""
    git, log = git_state(), _log(chosen, folder.name)
    inputs = log.with_suffix(".inputs")
    if not (folder.events.exists() and inputs.exists()) or (git is not None and git["dirty"]):
        return False
    with log.open(encoding="utf-8", errors="replace") as file:
        same = file.readline() == first_line(command) and inputs.read_text(encoding="utf-8") == chosen.inputs
    ends = [event for event in read_events(folder.events) if event["event"] in ("run_end", "checkpoint")]
    there = all(Path(folder.checkpoints / f"step-{event['step']}").exists() for event in ends[:-1])
    finished = bool(ends) and ends[-1].get("exit_code") == 0
    return same and finished and there and read_inputs(folder)["environment"].get("git") == git


def _launch(chosen: Plan, program: Sequence[str], output: Path, what: str, done: Callable[[], int], steps: int) -> None:
    """Run a job to its end. Prints its progress and about how long it will take, once it has done a step."""
    began = time.monotonic()

    def report() -> None:
        at = done()
        if at:
            left = (time.monotonic() - began) / at * (steps - at)
            print(f"{what} {at} of {steps}, about {duration(left)} left")

    processes, launcher, forks = chosen.processes, chosen.launcher, chosen.forks
    launch(program, processes=processes, log=output, launcher=launcher, forks=forks, report=report)


def walk_steps(chosen: Plan, run: Run) -> list[Walk]:
    """Single steps of the finished run, measured by a job with as many processes."""
    out, output = chosen.folder / "steps.json", _log(chosen, "step-parity")
    out.unlink(missing_ok=True)
    points = ",".join(map(str, chosen.points))
    program = ["-m", "tools.parity.steps", str(run.folder.path)]
    program += ["--out", str(out), "--points", points, "--walk", str(WALK)]

    def done() -> int:
        return output.read_text(encoding="utf-8", errors="replace").count(COMPARED)

    _launch(chosen, program, output, "single steps:", done, sum(lengths(chosen.points, WALK)))
    if not out.exists():
        again = "the same command at the same commit keeps the trained runs"
        raise UserError(f"single steps could not be compared: {error_line_of(output)}; see {output}; {again}")
    walks = walks_of(json.loads(out.read_text(encoding="utf-8")), run)
    out.unlink()
    return walks


def walks_of(measured: Sequence[dict[str, Any]], run: Run) -> list[Walk]:
    """The measurements of `tools.parity.steps` at each point, with what the run itself recorded there."""
    events = [*read_events(run.folder.events)]
    recorded = {event["step"]: event for event in events if event["event"] == "step"}
    same = () if any(event["event"] == "incident" for event in events) else RECORDED  # reactions change them
    found = []
    for point in measured:
        first = recorded.get(point["point"] + 1, {})
        known: dict[str, Any] = {"recorded_loss": first.get("loss"), "recorded_scale": first.get("loss_scale")}
        known["recorded"] = {key: first[key] for key in same if key in first}
        found.append(Walk(point["point"], point["restored"], point["steps"], why=point.get("why", ""), **known))
    return found


def trajectory(run: Run) -> Trajectory:
    """Losses, norms and counts of a run, from its events."""
    events = surviving(read_events(run.folder.events))
    steps = [event for event in events if event["event"] == "step"]
    scales = [event for event in events if event["event"] == "scale"]
    expected = {event["step"] for event in scales if event["reason"] in ("overflow", "hysteresis")}
    unexpected = [
        event
        for event in events
        if event["event"] == "nonfinite" and (event["step"] not in expected or event["tensor"] == "loss")
    ]
    losses = [event["loss"] for event in events if event["event"] == "eval"]
    bad_losses = sum(not math.isfinite(event["loss"]) for event in steps)
    return Trajectory(
        steps=[event["step"] for event in steps],
        losses=[event["loss"] for event in steps],
        grad_norms=[event["grad_norm"] for event in steps],
        skipped=sum(not event["applied"] for event in steps),
        nonfinite=max(len(unexpected), bad_losses),
        validation=losses[-1] if losses else None,
        settling=settling_of(steps, scales),
        lost=[event["step"] for event in steps if not event["applied"] and event["step"] in expected],
    )


def inner_dtypes(run: Run) -> list[dict[str, Any]]:
    """Reports in the run's `precision` events on the sums inside its modules (`precision.inner_dtypes`)."""
    events = read_events(run.folder.events)
    return [event["inner"] for event in events if event["event"] == "precision" and "inner" in event]


def _log(chosen: Plan, name: str) -> Path:
    return chosen.folder / "logs" / f"{name}.log"
