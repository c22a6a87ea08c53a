"""One trial of a sweep, from its start or its newest checkpoint to its end: also a task of a Slurm array.

It is a process of its own, so that what comes of its launcher is in its reach alone. It reads its run's events while
they are written, holds them against the other trials', and asks the run to save and end when it is hopeless.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from config.child_jobs import LAUNCHER_VARIABLES, error_line, free_port
from config.cli import CONFIG_ERROR, DIVERGED, PREEMPTED, REPOSITORY
from config.errors import UserError
from launch.job import KILL_AFTER_SECONDS, Job, ended_how
from launch.sweep.events import History, refreshed
from launch.sweep.file import as_setting
from launch.sweep.folder import ENDED, Entry, Outcome, Plan, Status, held
from launch.sweep.rule import verdict

MARK = "MANTISSA_SWEEP_TRIAL"
"""Environment variable that every process of a trial has: its run folder."""
PARENT = "MANTISSA_SWEEP_PARENT"
"""Environment variable: pid of the sweep that a trial must not outlive."""
POLL_SECONDS = 0.3
RECORD_SECONDS = 20.0
"""How often the time that a trial took is put down while it runs."""
_PR_SET_PDEATHSIG = 1
_EXIT_CODES: dict[Status, int] = {"done": 0, "hopeless": 0, "diverged": DIVERGED, "refused": CONFIG_ERROR}


def run_trial(plan: Plan, entry: Entry) -> int:
    """Bring one trial to its end, or as far as it is let.

    The exit code: 0 done or hopeless, 2 refused, 3 numerics, 75 asked to stop and saved, 1 anything else.
    """
    _end_with_the_sweep()
    with held(plan.folder / "trials" / f"{entry.index:03d}.lock", wait=True):
        outcome = plan.outcome(entry)
        end_strays(plan.run_folder(entry))
        if outcome.status not in ENDED:
            outcome = _Running(plan, entry, outcome).run()
            plan.record(entry, outcome)
    say(f"trial {entry.index} ({entry.label}) {outcome.status}" + (f": {outcome.reason}" if outcome.reason else ""))
    return PREEMPTED if outcome.status == "stopped" else _EXIT_CODES.get(outcome.status, 1)


def command_of(plan: Plan, entry: Entry, *, on_gpus: bool) -> list[str]:
    """The command line that starts a trial or goes on with it; a launcher gets a port of its own."""
    words = list(plan.launcher)
    if not words:
        words = [sys.executable]
        if plan.processes > 1:
            words += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(plan.processes)]
    program, given = Path(words[0]).name, {word.partition("=")[0].replace("_", "-") for word in words}
    if program == "deepspeed":
        if on_gpus and "--num-gpus" in given:
            # With --num_gpus it leaves CUDA_VISIBLE_DEVICES aside, and every slot would take the first GPUs.
            words = _without(words, "--num-gpus")
        if "--master-port" not in given:
            words[1:1] = ["--master_port", str(free_port())]
    elif program == "torchrun" and not given & {"--standalone", "--master-port", "--rdzv-endpoint"}:
        words.insert(1, "--standalone")
    elif program == "accelerate" and words[1:2] == ["launch"] and "--main-process-port" not in given:
        words[2:2] = ["--main_process_port", str(free_port())]
    own = {"run.dir": str(plan.folder), "run.name": entry.name}
    if entry.resolved["run"]["resume"] in ("auto", "never") or any(plan.run_folder(entry).glob("checkpoints/step-*")):
        own["run.resume"] = "auto"  # one that starts from a given checkpoint goes on from its own
    settings = [*entry.settings, *(f"{key}={as_setting(value)}" for key, value in own.items())]
    return [*words, str(REPOSITORY / "train.py"), "--config", plan.config, *settings]


class _Running:
    """One start of a trial."""

    def __init__(self, plan: Plan, entry: Entry, before: Outcome) -> None:
        self._plan, self._entry, self._before = plan, entry, before
        self._history = History(plan.run_folder(entry) / "events.jsonl")
        self._others = [
            History(plan.run_folder(other) / "events.jsonl") for other in plan.trials if other.index != entry.index
        ]
        self._judged = 0
        self._hopeless: str | None = None
        self._asked = False
        self._told_once = self._kill = False
        self._job: Job | None = None

    def run(self) -> Outcome:
        """Start the run and stay with it. What became of the trial."""
        self._history.refresh()
        if self._history.ended is not None and self._history.ended.get("exit_code") in (0, DIVERGED):
            return self._outcome(0, 0.0, "")  # the run had ended, and nobody was there to put it down
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._ask)
        log = self._plan.log(self._entry)
        began_at = log.stat().st_size if log.is_file() else 0
        says = sys.stdout
        with log.open("a", buffering=1, errors="replace") as output:
            sys.stdout = output  # where the job's lines go
            try:
                began = time.monotonic()
                code = self._until_the_end(began)
            finally:
                sys.stdout = says
        with log.open("rb") as file:
            file.seek(began_at)
            words = error_line(file.read().decode(errors="replace"))[:300]
        return self._outcome(code, time.monotonic() - began, words)

    def _until_the_end(self, began: float) -> int:
        entry, starts = self._entry, self._before.starts + 1
        command = command_of(self._plan, entry, on_gpus=bool(os.environ.get("CUDA_VISIBLE_DEVICES")))
        for name in LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
        os.environ[MARK] = str(self._plan.run_folder(entry))
        os.environ["MASTER_PORT"] = str(free_port())
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        print(f"$ {' '.join(command)}", flush=True)
        self._plan.record(entry, dataclasses.replace(self._before, status="running", starts=starts))
        again = f", start {starts}" if starts > 1 else ""
        say(f"trial {entry.index} ({entry.label}) runs{again}; {self._plan.log(entry)}")
        self._job = job = Job(command)
        codes: list[int] = []
        waiter = threading.Thread(target=lambda: codes.append(job.wait()), daemon=True)
        waiter.start()
        recorded, obeyed = began, False
        while waiter.is_alive():
            waiter.join(POLL_SECONDS)
            if self._kill:
                job.kill()
            elif self._asked or self._hopeless:
                obeyed = obeyed or job.ask_to_stop()  # no rank yet: ask again
            else:
                self._judge()
            if time.monotonic() - recorded > RECORD_SECONDS:
                recorded = time.monotonic()
                seconds = self._before.seconds + recorded - began
                self._plan.record(entry, Outcome("running", "", None, starts, seconds))
        return codes[0] if codes[0] else job.failed_code() or 0

    def _ask(self, number: int, frame: FrameType | None) -> None:
        """Save and end; a second SIGTERM or Ctrl-C kills. SIGUSR1 may come again and again, as Slurm's script does."""
        self._kill = self._kill or self._told_once and number != signal.SIGUSR1
        self._told_once = self._told_once or number != signal.SIGUSR1
        self._asked = True

    def _judge(self) -> None:
        rule = self._plan.hopeless
        if rule is None or not self._history.refresh():
            return
        reports = self._history.reports(rule)
        fresh = [count for count, report in enumerate(reports, start=1) if report.step > self._judged]
        if not fresh:
            return
        others = [history.reports(rule) for history in refreshed(self._others)]
        for count in fresh:
            self._judged = reports[count - 1].step
            self._hopeless = verdict(reports[:count], others, rule)
            if self._hopeless:
                say(f"trial {self._entry.index} is asked to save and end: {self._hopeless}")
                return

    def _outcome(self, code: int, seconds: float, words: str) -> Outcome:
        """What the run itself said about its end counts; what the launcher's exit code says, else."""
        self._history.refresh()
        said = self._history.ended or {}
        code = code if said.get("exit_code") is None else int(said["exit_code"])
        reason = str(said.get("reason", "") or "")
        status: Status
        if code == 0:
            status, reason = "done", ""
        elif code == DIVERGED:
            status, reason = "diverged", reason or words
        elif code == PREEMPTED and self._hopeless:
            status, reason = "hopeless", self._hopeless
        elif self._asked or code == PREEMPTED:
            status = "stopped"
        elif code == CONFIG_ERROR:
            status, reason = "refused", words
        else:
            status, reason = "crashed", reason or f"{ended_how(code)}: {words}"
        starts, before = self._before.starts + bool(seconds), self._before.seconds
        return Outcome(status, reason, code, starts, before + seconds)


def end_strays(run_folder: Path) -> None:
    """End what an earlier start of a trial left on this machine: its process was killed, or all of the sweep."""
    ends = time.monotonic() + KILL_AFTER_SECONDS
    number = signal.SIGTERM  # a rank saves; the launcher goes
    while strays := _marked(run_folder):
        for pid in strays:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if number is signal.SIGTERM:
            say(f"{len(strays)} processes of {run_folder.name} were left behind by an earlier start; they are ended")
        number = signal.SIGKILL if time.monotonic() > ends else signal.Signals(signal.SIGCONT)
        time.sleep(0.2)


def say(line: str) -> None:
    """One line of the sweep's own."""
    os.write(2, f"sweep: {line}\n".encode())


def _marked(run_folder: Path) -> list[int]:
    """Processes of a trial on this machine, this one not among them."""
    mark, found = f"{MARK}={run_folder}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0") and path.parent.name != str(os.getpid()):
                found.append(int(path.parent.name))
    return found


def _end_with_the_sweep() -> None:
    """A sweep that is killed takes its trials with it: they get SIGUSR1 from the kernel, save and end."""
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
    if os.getppid() != int(parent):
        raise UserError("the sweep that started this trial is gone; start the sweep again")


def _without(words: list[str], option: str) -> list[str]:
    """A command line without an option that takes a value, however it is spelled."""
    at = next(index for index, word in enumerate(words) if word.partition("=")[0].replace("_", "-") == option)
    return words[:at] + words[at + (1 if "=" in words[at] else 2) :]
