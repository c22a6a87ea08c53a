"""Start Mantissa's own programs as jobs: several processes under a launcher, output in a log, waited for.

What is compared is runs as users start them, not an imitation of them in this process.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from config.child_jobs import LAUNCHER_VARIABLES, by_interpreter, error_line, job_command, with_project
from config.cli import REPOSITORY, positive_int
from config.errors import UserError
from config.redact import redact_arguments
from config.schema import Config
from tracking.events import Event
from tracking.jsonl import read_events

TRAIN = (str(REPOSITORY / "train.py"),)
"""The program of a training job."""


def add_processes_option(parser: argparse.ArgumentParser) -> None:
    """--processes; None stands for `default_processes()`, which has to import torch."""
    parser.add_argument(
        "--processes", type=positive_int, help="processes of each job (default: one a GPU, two without)"
    )


def default_processes() -> int:
    """One process a GPU; two on a machine without."""
    import torch

    return torch.cuda.device_count() or 2


def launch(
    program: Sequence[str], *, processes: int, log: Path, launcher: Sequence[str] = (), seconds: float | None = None
) -> int:
    """Run `program` to its end and return the launcher's exit code, which may be 1 for every failure of the program.

    As `start`. seconds: after which the job is killed with all that it started, and subprocess.TimeoutExpired raised.
    """
    job = start(program, processes=processes, log=log, launcher=launcher)
    try:
        return job.wait(seconds)
    except BaseException:
        kill(job)
        raise


def start(
    program: Sequence[str], *, processes: int, log: Path, launcher: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start `program` and return at once.

    program, launcher: as `job_command` takes them. Standard output and error go to `log`. Raises UserError when the
    launcher does not exist.
    """
    command = job_command(program, processes=processes, launcher=launcher)
    programs = str(Path(sys.executable).parent)
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment = with_project(environment)
    environment["PATH"] = os.pathsep.join([programs, environment.get("PATH", "")])
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        output.write(f"$ {' '.join(redact_arguments(command))}\n")
        output.flush()
        command = by_interpreter(command, environment["PATH"])
        try:
            return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        except FileNotFoundError as error:
            raise UserError(f"--launch: there is no program {launcher[0]}; install it or give another") from error


def kill(job: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a job and to all that it started, in whatever session: launchers put ranks into their own."""
    import psutil  # only here

    try:
        everyone = psutil.Process(job.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        everyone = []
    for process in (job, *everyone):  # the launcher first: it would report and restart its ranks
        with suppress(psutil.NoSuchProcess):
            process.kill()
    job.wait()


def train(
    arguments: Sequence[str], folder: Path, name: str, *, processes: int, seconds: float | None = None
) -> tuple[int, Path, list[Event]]:
    """Run train.py to its end as the run `folder`/runs/`name`: its exit code, its log and its events. As `launch`."""
    log, events = folder / "logs" / f"{name}.log", folder / "runs" / name / "events.jsonl"
    code = launch(training_program(arguments, folder, name), processes=processes, log=log, seconds=seconds)
    return code, log, list(read_events(events)) if events.exists() else []


def training_program(arguments: Sequence[str], folder: Path, name: str) -> list[str]:
    """train.py and its arguments, for the run `folder`/runs/`name`."""
    return [*TRAIN, *arguments, f"run.dir={folder / 'runs'}", f"run.name={name}"]


def shorten(config: Config, steps: int) -> list[str]:
    """The overrides for a run of `steps` steps; the warm-up keeps its share."""
    warmup = math.ceil(config.schedule.warmup_steps * steps / config.run.steps)
    return [f"run.steps={steps}", f"schedule.warmup_steps={warmup}"]


def in_turn(names: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """(number of the repeat from 1, name): every name in each repeat, the order reversed in every other one."""
    for number in range(1, repeats + 1):
        for name in names if number % 2 else reversed(names):
            yield number, name


def error_line_of(log: Path) -> str:
    """The line of a failed job's log that says why: our own error line, else the last that names one, else the last."""
    return error_line(log.read_text(errors="replace", encoding="utf-8"))[:400]
