"""Run one trial of a sweep, from its start or newest checkpoint to its end; also used for tasks of a Slurm array.

It is a separate process, because a Job ends all descendants of its process. It reads the run's events as they are
written, compares them with those of the other trials, and makes the run save and end if it is hopeless.
"""

import ctypes
import dataclasses
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TextIO

from config.cli import CONFIG_ERROR, DIVERGED, PREEMPTED
from config.errors import UserError
from config.machine.processes import describe_exit, free_port
from launch import job
from launch.forks import KILL_AFTER_SECONDS, signal_all
from launch.hosts import without_options
from launch.job import TRAIN, Job, environment_of, error_line, job_command, job_environment
from launch.supervise import Session
from launch.sweep.events import History
from launch.sweep.file import as_setting
from launch.sweep.folder import ENDED, Entry, Outcome, Plan, Status
from launch.sweep.rule import hopeless_reason
from tracking.file_lock import exclusive_lock

RUN_FOLDER_VARIABLE = "MANTISSA_SWEEP_TRIAL"
"""Environment variable with the run folder, set for every process of a trial."""
SWEEP_PID_VARIABLE = "MANTISSA_SWEEP_PARENT"
"""Environment variable with the pid of the sweep, which a trial must not outlive."""
POLL_SECONDS = 0.3
RECORD_SECONDS = 20.0
"""Interval at which the elapsed time of a running trial is recorded."""
_PR_SET_PDEATHSIG = 1
log = partial(job.log, program="sweep")
_EXIT_CODES = {**dict.fromkeys(ENDED, 0), "diverged": DIVERGED, "stopped": PREEMPTED, "refused": CONFIG_ERROR}


def run_trial(plan: Plan, entry: Entry) -> int:
    """Run one trial to its end, unless it is stopped. Returns the exit code: 0 done, hopeless or run.max_minutes is up,
    2 refused, 3 numerics, 75 stopped on request, 1 anything else."""
    _end_with_sweep()
    with exclusive_lock(plan.folder / "trials" / f"{entry.index:03d}.lock", -1):
        outcome = plan.outcome(entry)
        end_leftover_processes(plan.run_folder(entry))
        if outcome.status not in ENDED:
            outcome = _Running(plan, entry, outcome).run()
            plan.record(entry, outcome)
    log(f"trial {entry.index} ({entry.label}) {outcome.status}" + (f": {outcome.reason}" if outcome.reason else ""))
    return _EXIT_CODES.get(outcome.status, 1)


def command_of(plan: Plan, entry: Entry, *, on_gpus: bool) -> list[str]:
    """Command line that starts or resumes a trial; a launcher gets its own port."""
    words = list(plan.launcher)
    program, given = Path(words[0]).name if words else "", {word.partition("=")[0].replace("_", "-") for word in words}
    if program == "deepspeed":
        if on_gpus and "--num-gpus" in given:
            # With --num_gpus, deepspeed ignores CUDA_VISIBLE_DEVICES and every slot would take the first GPUs.
            words = without_options(words, "--num-gpus")
        if "--master-port" not in given:
            words[1:1] = ["--master_port", str(free_port())]
    elif program == "torchrun" and not given & {"--standalone", "--master-port", "--rdzv-endpoint"}:
        words.insert(1, "--standalone")
    elif program == "accelerate" and words[1:2] == ["launch"] and "--main-process-port" not in given:
        words[2:2] = ["--main_process_port", str(free_port())]
    own = {"run.dir": str(plan.folder), "run.name": entry.name}
    if entry.resolved["run"]["resume"] in ("auto", "never") or any(plan.run_folder(entry).glob("checkpoints/step-*")):
        own["run.resume"] = "auto"  # resume from its own checkpoint, not from the given one
    settings = [*entry.settings, *(f"{key}={as_setting(value)}" for key, value in own.items())]
    return job_command([*TRAIN, "--config", plan.config, *settings], processes=plan.processes, launcher=words)


class _Running:
    """One start of a trial."""

    def __init__(self, plan: Plan, entry: Entry, before: Outcome) -> None:
        self._plan, self._entry, self._before = plan, entry, before
        self._history = History(plan.run_folder(entry) / "events.jsonl")
        others = [other for other in plan.current if other.index != entry.index]
        self._others = [History(plan.run_folder(other) / "events.jsonl") for other in others]
        self._judged_step = 0
        self._hopeless: str | None = None
        self._stop_requested = self._terminated = self._kill = False
        self._job: Job | None = None

    def run(self) -> Outcome:
        """Start the run, wait for it, and return the trial's outcome."""
        self._history.refresh()
        if self._history.ended is not None and self._history.ended.get("exit_code") in (0, DIVERGED):
            return self._outcome(0, 0.0, "")  # the run outlived the process that should record its end
        self._history.ended = None  # an earlier start's; this one may fail before it records anything
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._request_stop)
        path = self._plan.log_path(self._entry)
        size_before = path.stat().st_size if path.is_file() else 0
        with path.open("a", buffering=1, errors="replace", encoding="utf-8") as output:
            began = time.monotonic()
            code = self._run_job(began, output)
        with path.open("rb") as file:
            file.seek(size_before)
            error = error_line(file.read().decode(errors="replace"))[:300]
        return self._outcome(code, time.monotonic() - began, error)

    def _run_job(self, began: float, output: TextIO) -> int:
        entry, starts = self._entry, self._before.starts + 1
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        command = command_of(self._plan, entry, on_gpus=bool(devices))
        output.write(job.first_line(command))
        self._plan.record(entry, dataclasses.replace(self._before, status="running", starts=starts))
        again = f", start {starts}" if starts > 1 else ""
        log(f"trial {entry.index} ({entry.label}) runs{again}; {self._plan.log_path(entry)}")
        own = {RUN_FOLDER_VARIABLE: str(self._plan.run_folder(entry)), "MASTER_PORT": str(free_port())}
        if devices:  # under Slurm there may be more, and deepspeed would start a process on each
            own["CUDA_VISIBLE_DEVICES"] = ",".join(devices.split(",")[: self._plan.processes])
        self._job = running = Job(command, environment=job_environment(**own), output=output)
        codes: list[int] = []
        waiter = threading.Thread(target=lambda: codes.append(running.wait()), daemon=True)
        waiter.start()
        recorded, stop_sent = began, False
        while waiter.is_alive():
            waiter.join(POLL_SECONDS)
            if self._kill:
                running.kill()
            elif self._stop_requested or self._hopeless:
                stop_sent = stop_sent or running.request_stop()  # retried until there is a rank
            else:
                self._judge()
            if time.monotonic() - recorded > RECORD_SECONDS:
                recorded = time.monotonic()
                seconds = self._before.seconds + recorded - began
                self._plan.record(entry, Outcome("running", "", None, starts, seconds))
        failed = running.failed_code()
        return failed if failed and codes[0] in (0, 1) else codes[0]  # torchrun's own is 1 for every failure

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        """Make the run save and end; a second SIGTERM or Ctrl-C kills it. SIGUSR1 may repeat, as from Slurm."""
        self._kill = self._kill or self._terminated and number != signal.SIGUSR1
        self._terminated = self._terminated or number != signal.SIGUSR1
        self._stop_requested = True

    def _judge(self) -> None:
        rule = self._plan.hopeless
        if rule is None or not self._history.refresh():
            return
        reports = self._history.reports(rule)
        fresh = [count for count, report in enumerate(reports, start=1) if report.step > self._judged_step]
        if not fresh:
            return
        for history in self._others:
            history.refresh()
        others = [history.reports(rule) for history in self._others]
        for count in fresh:
            self._judged_step = reports[count - 1].step
            self._hopeless = hopeless_reason(reports[:count], others, rule)
            if self._hopeless:
                log(f"trial {self._entry.index} is stopped: {self._hopeless}")
                return

    def _outcome(self, code: int, seconds: float, error: str) -> Outcome:
        """Outcome according to the run's own run_end event, or else to the launcher's exit code."""
        self._history.refresh()
        end = self._history.ended or {}
        reason = str(end.get("reason", "") or "")
        if end.get("exit_code") is not None:
            code = int(end["exit_code"])
        elif code == 0:  # DeepSpeed's runner ends so when a signal has killed its launcher
            code, reason = 1, "the launcher ended with exit code 0, but the run recorded no end"
        session = Session(reason=reason, seconds=end.get("time", 0.0) - self._history.began)
        status: Status
        if code == 0:
            status, reason = "done", ""
        elif code == DIVERGED:
            status, reason = "diverged", reason or error
        elif code == PREEMPTED and self._hopeless:
            status, reason = "hopeless", self._hopeless
        elif code == PREEMPTED and session.is_out_of_time(self._entry.resolved["run"]["max_minutes"]):
            status, reason = "out of time", "run.max_minutes is up"
        elif self._stop_requested or code == PREEMPTED:
            status = "stopped"
        elif code == CONFIG_ERROR:
            status, reason = "refused", error
        else:
            status, reason = "crashed", reason or f"{describe_exit(code)}: {error}"
        starts, before = self._before.starts + bool(seconds), self._before.seconds
        return Outcome(status, reason, code, starts, before + seconds)


def end_leftover_processes(run_folder: Path) -> None:
    """End processes that an earlier start of a trial left on this machine because it or the whole sweep was killed."""
    ends = time.monotonic() + KILL_AFTER_SECONDS
    number = signal.SIGTERM  # a rank saves; the launcher ends
    while leftover := _trial_processes(run_folder):
        signal_all(leftover, number)
        if number is signal.SIGTERM:
            log(f"{len(leftover)} processes of {run_folder.name} were left behind by an earlier start; they are ended")
        number = signal.SIGKILL if time.monotonic() > ends else signal.Signals(signal.SIGCONT)
        time.sleep(0.2)


def _trial_processes(run_folder: Path) -> list[int]:
    """Pids of a trial's processes on this machine, except this one."""
    pids = {int(path.name) for path in Path("/proc").glob("[0-9]*")} - {os.getpid()}
    return [pid for pid in pids if environment_of(pid).get(RUN_FOLDER_VARIABLE) == str(run_folder)]


def _end_with_sweep() -> None:
    """Make the kernel send SIGUSR1 if the sweep dies, so that the trial saves and ends."""
    parent = os.environ.pop(SWEEP_PID_VARIABLE, None)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
    if os.getppid() != int(parent):
        raise UserError("the sweep that started this trial is gone; start the sweep again")
