"""Training jobs: command line, environment and output, and an end that leaves no process behind.

`start` and `launch` run one of Mantissa's programs the way users do, as several processes under a launcher, with output
in a log. `Job` supervises one start of any command line. A launcher can die and leave its ranks running, as the
deepspeed launcher does on SIGTERM, so the process that owns a `Job` adopts all orphaned descendants
(PR_SET_CHILD_SUBREAPER in prctl(2)), including those in their own sessions.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from config.cli import REPOSITORY
from config.command_line import parse
from config.errors import UserError
from config.machine.processes import describe_exit, read
from config.options import positive_int
from config.printable import shown
from config.redact import redact_arguments
from config.resolved import Resolved, resolve_run
from launch.doctor.facts import run_program
from launch.forks import KILL_AFTER_SECONDS, ForkedJob, Forks, signal_all
from launch.hosts import Hosts, option_value

if TYPE_CHECKING:
    from config.schema import Config
    from tracking.events import Event

TRAIN = (str(REPOSITORY / "train.py"),)
NO_STORE = ("checkpoint.dir=null", "checkpoint.storage_options={}")
"""Overrides that keep a job's checkpoints out of the store that the config names for the user's own run."""
REPORT_SECONDS = 30.0
"""[seconds] Interval between calls of the `report` given to `launch`."""
LINGER_SECONDS = 60.0
"""[seconds] How long a launcher may linger after a rank was lost and none runs here. pdsh waits forever for a machine
that is cut off; the deepspeed launcher and torchrun end within 30 s."""
_PR_SET_CHILD_SUBREAPER = 36
_KEPT_LINES = 400
_LOST_LINE = re.compile(r"error: (rank \d+ .*?); rank \d+ stops, exit code")
_TORCHRUN_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
_RUNS_SCRIPT = re.compile(r"[^\0]*python[^/\0]*\0(-[XW]\0[^\0]+\0|-[^mc\0][^\0]*\0)*[^-\0][^\0]*\.py\0")
_MODULES = {
    ("deepspeed",): "deepspeed.launcher.runner",
    ("torchrun",): "torch.distributed.run",
    ("accelerate", "launch"): "accelerate.commands.launch",
}
_PROCESS_OPTIONS = ("--num-gpus", "--num-accelerators", "--nproc-per-node", "--num-processes")
"""Options of deepspeed, torchrun and accelerate launch for the number of processes."""
_MODULE_OPTION = {"deepspeed": "--module", "accelerate": "--module"}
LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Variables that a launcher sets for its processes; a job started from within another must not inherit them."""


def refusal(arguments: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Why `train.py` would reject these arguments (`--config FILE` and overrides); None if they can be resolved."""
    try:
        resolve_run(parse(arguments), environment)
    except UserError as error:
        return str(error).removeprefix("command line: ")
    return None


def add_processes_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --processes, whose default None means `default_processes()`."""
    parser.add_argument("--processes", type=positive_int, help="processes of each job (default: one per GPU, or two)")


def default_processes() -> int:
    """One process per GPU; two on a machine without GPUs."""
    return len(visible_gpus()) or 2


def own_processes(launcher: Sequence[str]) -> int | None:
    """Number of processes that a launcher starts by its hostfile or options; None if they do not say. Raises UserError
    for a hostfile that cannot be read."""
    hosts = Hosts.of_command(launcher)
    if hosts is not None:
        return sum(hosts.slots.values())
    each, nodes = option_value(launcher, *_PROCESS_OPTIONS) or "", option_value(launcher, "--nnodes") or "1"
    return int(each) * int(nodes) if each.isdecimal() and nodes.isdecimal() else None


def processes_of(launcher: Sequence[str], given: int | None, *, option: str = "--launch") -> int:
    """Number of processes of a job: `given` (--processes), the launcher's own, or without either `default_processes()`.

    option: what the launcher was given with. Raises UserError if it starts another number, or if nothing says how many.
    """
    own, line = own_processes(launcher), shlex.join(launcher)
    if launcher and own is None and given is None:
        raise UserError(f"{option}: '{line}' does not say how many processes it starts; add --processes N")
    if own is not None and given not in (None, own):
        raise UserError(f"{option}: '{line}' starts {own}, not {given} processes; leave --processes out or correct it")
    return given or own or default_processes()


def visible_gpus() -> list[str]:
    """GPUs in CUDA_VISIBLE_DEVICES, else those listed by nvidia-smi; empty without GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    _, listed, _ = run_program(["nvidia-smi", "-L"], 60.0)
    return [str(n) for n in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]


def with_project(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment, extended so that a process finds Mantissa's modules from any folder."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), environment.get("PYTHONPATH")]))
    return {**environment, "PYTHONPATH": path}


def job_environment(**further: str) -> dict[str, str]:
    """Environment for another job: without this process's launcher variables, with this Python's programs on PATH."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return with_project({**kept, "PATH": path, **further})


def by_interpreter(command: Sequence[str], path: str | None = None) -> list[str]:
    """The command line, with a launcher of this environment run as a module by this interpreter.

    The `deepspeed` script that pip installs cannot start if the path of the environment contains a space. path: PATH of
    the command, if it is not this process's.
    """
    for words, module in _MODULES.items():
        if tuple(command[: len(words)]) == words:
            found = shutil.which(words[0], path=path)
            if found is None or Path(found).parent == Path(sys.executable).parent:
                return [sys.executable, "-m", module, *command[len(words) :]]
    return list(command)


def job_command(program: Sequence[str], *, processes: int, launcher: Sequence[str] = ()) -> list[str]:
    """Command line that starts a program as several processes.

    program: a script and its arguments, or ("-m", module, arguments ...). launcher: a command such as
    ("deepspeed", "--hostfile", "hosts"), which then determines hosts and processes; default: torchrun on this machine.
    """
    if launcher:
        module = _MODULE_OPTION.get(Path(launcher[0]).name, "-m")
        return [*launcher, *([module, *program[1:]] if program[0] == "-m" else program)]
    if processes == 1:
        return [sys.executable, *program]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [sys.executable, *launch, *program]


def launch(
    program: Sequence[str],
    *,
    processes: int,
    log: Path,
    launcher: Sequence[str] = (),
    forks: Forks | None = None,
    seconds: float | None = None,
    report: Callable[[], object] | None = None,
) -> int:
    """Run `program` to its end and return the launcher's exit code, which may be 1 for any failure of the program.

    Other arguments as for `start`. forks: where the ranks come from, instead of a launcher. seconds: time limit, after
    which the job and everything it started is killed and subprocess.TimeoutExpired is raised. report: called every
    `REPORT_SECONDS` while the job runs. SIGTERM to this process also ends the job. If a signal ended the job, the last
    line of the log says so.
    """
    job: subprocess.Popen[bytes] | ForkedJob
    if forks is None:
        job = start(program, processes=processes, log=log, launcher=launcher)
    else:
        with _opened(log, job_command(program, processes=processes)) as output:
            job = forks.start(program, job_environment(), output.fileno())
    ends = math.inf if seconds is None else time.monotonic() + seconds
    try:
        with exit_on_sigterm():
            while True:
                left = ends - time.monotonic()
                try:
                    code = job.wait(max(0.0, min(left, REPORT_SECONDS)))
                    break
                except subprocess.TimeoutExpired as waited:
                    if seconds is not None and left <= REPORT_SECONDS:
                        raise subprocess.TimeoutExpired(waited.cmd, seconds) from None
                if report is not None:
                    report()
    except BaseException:
        kill(job)
        raise
    _note_signal(log, code)
    return code


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Context manager: SIGTERM raises SystemExit. No effect outside the main thread, where handlers cannot be set."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _note_signal(log: Path, code: int) -> None:
    """Append to the log which signal ended the job, if any, since the program itself could not."""
    reported, who = _torchrun_report(log.read_text(errors="replace", encoding="utf-8")), "it"
    if reported and reported[1] < 0:
        who, code = f"rank {reported[0]}", reported[1]
    if code < 0:
        memory = ", as the kernel does when memory runs out (see dmesg)" if code == -signal.SIGKILL else ""
        with log.open("a", encoding="utf-8") as file:
            file.write(f"error: {who} {describe_exit(code)}{memory}\n")


def _torchrun_report(output: str) -> tuple[int, int] | None:
    """(rank, exit code) of the first failure, if torchrun reports it."""
    found = _TORCHRUN_CAUSE.findall(output)
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def start(
    program: Sequence[str], *, processes: int, log: Path, launcher: Sequence[str] = (), own_session: bool = False
) -> subprocess.Popen[bytes]:
    """Start `program` and return at once. program, launcher: as for `job_command`. Standard output and error go to
    `log`. own_session: shields it from the terminal's signals. Raises UserError if the launcher does not exist."""
    command, environment = job_command(program, processes=processes, launcher=launcher), job_environment()
    with _opened(log, command) as output:
        try:
            return subprocess.Popen(
                by_interpreter(command, environment["PATH"]),
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=own_session,
            )
        except FileNotFoundError as error:
            raise UserError(f"--launch: there is no program {launcher[0]}; install it or give another") from error


@contextmanager
def _opened(log: Path, command: Sequence[str]) -> Iterator[TextIO]:
    """A job's new log, which begins with its command line."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        output.write(first_line(command))
        output.flush()
        yield output


def first_line(command: Sequence[str]) -> str:
    """First line of a job's log: its command line, without secrets."""
    return f"$ {' '.join(redact_arguments(list(command)))}\n"


def kill(job: subprocess.Popen[bytes] | ForkedJob, number: int = signal.SIGKILL) -> None:
    """Send a signal to a job and to everything it started, in any session, and wait for the job."""
    others = _descendants(job.pid)
    job.send_signal(number)  # the launcher first, or it would report and restart its ranks
    signal_all(others, number)
    job.wait()


def train(
    arguments: Sequence[str], folder: Path, name: str, *, processes: int, seconds: float | None = None
) -> tuple[int, Path, list[Event]]:
    """Run train.py to its end as the run `folder`/runs/`name`, by `launch`; returns (exit code, log, events)."""
    from tracking.compare.surviving import read_events

    log, events = folder / "logs" / f"{name}.log", folder / "runs" / name / "events.jsonl"
    code = launch(training_program(arguments, folder, name), processes=processes, log=log, seconds=seconds)
    return code, log, list(read_events(events)) if events.exists() else []


def training_program(arguments: Sequence[str], folder: Path, name: str) -> list[str]:
    """train.py and its arguments for the run `folder`/runs/`name`."""
    return [*TRAIN, *arguments, f"run.dir={folder / 'runs'}", f"run.name={name}"]


def with_steps(resolved: Resolved) -> list[str]:
    """Overrides with the run.steps that run.epochs and the data, prepared for it, come to; none without epochs.
    Raises UserError if the data cannot be prepared, or if epochs and data contradict each other."""
    from training.tasks.shape import settle_steps
    from training.tasks.task import prepare

    config = resolved.config
    if config.run.epochs is None:
        return []
    return ["run.epochs=null", f"run.steps={settle_steps(config, prepare(config, progress=True)).run.steps}"]


def shorten(config: Config, steps: int) -> list[str]:
    """Overrides for a run of `steps` steps whose warm-up keeps its share."""
    whole = config.run.steps or max(steps, config.schedule.warmup_steps)  # not known yet with run.epochs
    warmup = math.ceil(config.schedule.warmup_steps * steps / whole)
    in_steps = [] if config.run.epochs is None else ["run.epochs=null"]
    return [*in_steps, f"run.steps={steps}", f"schedule.warmup_steps={warmup}", *without_later(config, steps)]


def without_later(config: Config, steps: int) -> list[str]:
    """Overrides that turn off what would begin after `steps`, and which a run of that length is refused for."""
    guard, profile = config.guard, config.profile
    off = ["guard.spike_sigmas=0"] if guard.spike_sigmas and steps <= (guard.spike_window + 1) // 2 else []
    return off + (["profile.steps=0"] if profile.steps and steps < profile.start else [])


def in_turn(names: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """(number of the repeat from 1, name) pairs: every name in each repeat, in reverse order every other repeat."""
    for number in range(1, repeats + 1):
        for name in names if number % 2 else reversed(names):
            yield number, name


def error_line_of(log: Path) -> str:
    """The line of a failed job's log that says why, at most 400 characters; see `error_line`."""
    return error_line(log.read_text(errors="replace", encoding="utf-8"))[:400]


def error_line(output: str) -> str:
    """Why a job failed: the last `error:` line of its output, else the last naming an Error, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("error:")]
    # torchrun's own error comes last and is uninformative
    raised = [line for line in lines if "Error:" in line and "ChildFailedError" not in line]
    return (ours or raised or lines or ["it printed nothing"])[-1]


class Job:
    """A launcher and its descendants."""

    def __init__(
        self,
        command: Sequence[str],
        hosts: Hosts | None = None,
        names: Sequence[str] = (),
        *,
        environment: Mapping[str, str] = os.environ,
        output: TextIO | None = None,
    ) -> None:
        """Start it in its own session, so that the terminal's signals reach only this process.

        names: machines of `hosts` that it runs on, if not here. output: where its output goes; default: standard
        output. Raises UserError if there is no such program.
        """
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._command, self._hosts, self._names = list(command), hosts, list(names)
        self._output = output
        self._lost_at: float | None = None
        try:
            self._launcher = subprocess.Popen(
                by_interpreter(self._command, environment.get("PATH")),
                env=hosts.environment() if hosts else environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"command line: cannot start {command[0]} ({error.strerror})") from error
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self) -> int:
        """Wait for the launcher, end what it left running, and return its exit code (negative for a signal)."""
        while self._launcher.poll() is None:
            time.sleep(0.1)
            self._reap_orphans()
            lost = self._lost_at
            if lost is not None and time.monotonic() - lost > LINGER_SECONDS:
                self._lost_at = None
                if not dict(self._ranks()):  # otherwise torchrun has restarted them
                    log(f"the launcher still waits {LINGER_SECONDS:.0f} s after a rank was lost: ended")
                    self.kill()
        self._end_remaining()
        self._reader.join(timeout=5)
        return self._launcher.returncode

    def request_stop(self) -> bool:
        """Make the run save and end by SIGUSR1 to one rank, which all ranks follow; False if no rank is running (yet).
        The launcher gets no signal, since torchrun and the deepspeed launcher kill their ranks 30 s after one."""
        if self._hosts is not None:
            return self._hosts.signal_rank_0(self._names)
        ranks = self._single_process() or dict(self._ranks())
        for rank in sorted(ranks):
            with suppress(ProcessLookupError):
                os.kill(ranks[rank], signal.SIGUSR1)
                return True
        return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        signal_all(_descendants(os.getpid()), number)

    def failure_cause(self) -> str | None:
        """Cause of the lost rank according to the output: train.py's own line, else torchrun's report; None without."""
        ours, reported = _LOST_LINE.search("".join(self._lines)), _torchrun_report("".join(self._lines))
        if ours:
            return ours[1]
        return f"rank {reported[0]} {describe_exit(reported[1])}" if reported else None

    def failed_code(self) -> int | None:
        """Exit code of the rank that failed first, if torchrun reports it."""
        reported = _torchrun_report("".join(self._lines))
        return reported[1] if reported else None

    def _read(self) -> None:
        assert self._launcher.stdout is not None
        for line in iter(self._launcher.stdout.readline, b""):
            text = line.decode(errors="replace")
            self._lines.append(text)
            if self._lost_at is None and _LOST_LINE.search(text):
                self._lost_at = time.monotonic()
            with suppress(OSError, ValueError):
                output = self._output or sys.stdout
                output.write(text)
                output.flush()

    def _ranks(self) -> Iterator[tuple[int, int]]:
        """(rank, pid) of every rank on this machine. Children inherit RANK, so only the topmost process counts."""
        seen: set[int] = set()
        for pid in _descendants(os.getpid()):  # parents first
            environment = environment_of(pid)
            if "RANK" in environment and "LOCAL_RANK" in environment and int(environment["RANK"]) not in seen:
                seen.add(int(environment["RANK"]))
                yield int(environment["RANK"]), pid

    def _single_process(self) -> dict[int, int]:
        """{0: pid} of `python train.py`, however it was started without a launcher; else empty. It sets RANK=0 for
        itself after it starts, which /proc shows only in the environment of its helpers."""
        launchers = {*(words[0] for words in _MODULES), *_MODULES.values()}
        before = takewhile(lambda word: not word.endswith(".py"), self._command)
        if launchers.intersection(Path(word).name for word in before):
            return {}
        for pid in _descendants(os.getpid()):  # parents first
            command = read(f"/proc/{pid}/cmdline")
            if _RUNS_SCRIPT.match(command) and not {"RANK", "LOCAL_RANK"} <= environment_of(pid).keys():
                return {0: pid}
        return {}

    def _reap_orphans(self) -> None:
        """Reap adopted processes that have ended, since DeepSpeed's launcher waits 30 s for a zombie."""
        for pid in _children(os.getpid()):
            with suppress(ProcessLookupError, ChildProcessError):
                if pid != self._launcher.pid and os.getsid(pid) != os.getsid(0):  # ours has ssh, waited for elsewhere
                    os.waitpid(pid, os.WNOHANG)

    def _end_remaining(self) -> None:
        ends = time.monotonic() + KILL_AFTER_SECONDS
        if _descendants(os.getpid()):
            self.kill(signal.SIGTERM)
        while _descendants(os.getpid()):
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if time.monotonic() > ends:
                self.kill()
            time.sleep(0.05)
        if self._hosts is not None:
            self._hosts.end_processes(self._names)


def log(line: str, program: str = "supervise") -> None:
    """Write one line to stderr, prefixed with the program's name."""
    os.write(2, f"{program}: {shown(line)}\n".encode())  # unbuffered: a signal handler may interrupt another line


def _descendants(pid: int) -> list[int]:
    """Every descendant of `pid`, parents before their children."""
    found, queue = [], [pid]
    while queue:
        parent = queue.pop(0)
        queue += _children(parent)
        found.append(parent)
    return found[1:]


def _children(pid: int) -> list[int]:
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in read(path).split()]


def environment_of(pid: int) -> dict[str, str]:
    """A process's environment as it was started with; empty if it cannot be read."""
    try:
        text = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
