"""Run trials in parallel on this machine: each slot runs one trial at a time, with its own devices and port."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from types import FrameType

from config.cli import DIVERGED, PREEMPTED
from config.errors import UserError
from config.machine.processes import describe_exit
from launch.job import job_environment
from launch.sweep.events import read_history
from launch.sweep.folder import ENDED, Entry, Outcome, Plan
from launch.sweep.trial import SWEEP_PID_VARIABLE, end_leftover_processes, log

MAX_FAILURES_WITHOUT_STEP = 3
"""Consecutive trials failing before their first step after which no further trial is started."""


def slot_environments(plan: Plan, devices: list[str]) -> list[dict[str, str]]:
    """Environment variables of each slot: its threads and GPUs. Raises UserError if there are too few GPUs."""
    slots, each = min(plan.slots, len(plan.current)), plan.processes
    if devices and slots * each > len(devices):
        problem = f"{slots} slots of {each} processes take {slots * each} GPUs and there are {len(devices)}"
        raise UserError(f"{plan.folder / 'sweep.json'}: {problem}; lower slots or processes")
    threads = max(1, len(os.sched_getaffinity(0)) // (slots * each))
    found = []
    for slot in range(slots):
        environment = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[slot * each : (slot + 1) * each])
        found.append(environment)
    return found


class Slots:
    """Runs the trials that have not ended yet, in file order, until all have."""

    def __init__(self, plan: Plan, slots: list[dict[str, str]]) -> None:
        self._plan, self._slots = plan, slots
        self._running: dict[int, tuple[Entry, subprocess.Popen[bytes]]] = {}
        self._stop_reason: str | None = None
        self._signals = 0
        self._failures_without_step = 0

    def run(self) -> int:
        """Returns the sweep's exit code: 0 all trials ended, 3 all of them on numerics, 75 stopped, 1 some failed."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._stop)
        waiting = deque(entry for entry in self._plan.current if self._plan.outcome(entry).status not in ENDED)
        ends = time.monotonic() + 60 * self._plan.minutes if self._plan.minutes else None
        signals_sent = 0
        while self._running or (waiting and self._stop_reason is None):
            for slot in range(len(self._slots)):
                if slot not in self._running and waiting and self._stop_reason is None:
                    self._start(slot, waiting.popleft())
            time.sleep(0.1)
            for slot in [slot for slot, (_, process) in self._running.items() if process.poll() is not None]:
                self._ended(*self._running.pop(slot))
            if ends is not None and time.monotonic() > ends and self._stop_reason is None:
                self._stop_reason = f"the {self._plan.minutes:g} minutes are up"
            if self._stop_reason is not None and signals_sent < max(1, self._signals):
                signals_sent = max(1, self._signals)
                self._signal_all()
        return self._exit_code()

    def _start(self, slot: int, entry: Entry) -> None:
        environment = job_environment(**self._slots[slot], **{SWEEP_PID_VARIABLE: str(os.getpid())})
        command = [sys.executable, "-m", "launch.sweep", "--trial", str(entry.index), str(self._plan.folder)]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        self._running[slot] = (entry, process)

    def _ended(self, entry: Entry, process: subprocess.Popen[bytes]) -> None:
        outcome = self._plan.outcome(entry)
        if outcome.status == "running" or process.returncode < 0:  # it died before recording its end
            end_leftover_processes(self._plan.run_folder(entry))
            reason = f"the sweep's process for this trial {describe_exit(process.returncode)}"
            outcome = Outcome("crashed", reason, process.returncode, outcome.starts, outcome.seconds)
            self._plan.record(entry, outcome)
            log(f"trial {entry.index} ({entry.label}) crashed: {reason}")
        failed = outcome.status in ("crashed", "refused")
        no_step = failed and not read_history(self._plan.run_folder(entry)).steps
        self._failures_without_step = self._failures_without_step + 1 if no_step else 0
        if self._failures_without_step >= MAX_FAILURES_WITHOUT_STEP and self._stop_reason is None:
            self._stop_reason = f"{MAX_FAILURES_WITHOUT_STEP} trials in a row failed before their first step"

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._stop_reason = self._stop_reason or signal.Signals(number).name

    def _signal_all(self) -> None:
        """Signal all trials: the first time they save and end, the second time they are killed."""
        what = "save and end; a second signal kills them" if self._signals < 2 else "are killed"
        log(f"{self._stop_reason}: running trials {what}")
        for _, process in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def _exit_code(self) -> int:
        found = {self._plan.outcome(entry).status for entry in self._plan.current}
        if found & {"waiting", "running", "stopped"}:
            return PREEMPTED if self._failures_without_step < MAX_FAILURES_WITHOUT_STEP else 1
        if found & {"crashed", "refused"}:
            return 1
        return DIVERGED if found == {"diverged"} else 0
