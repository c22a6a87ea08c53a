"""One start of a training job through its launcher: its output, its processes, and an end that leaves none behind.

A launcher can die and leave its ranks running, as the deepspeed launcher does on SIGTERM. So this process adopts every
orphaned descendant (PR_SET_CHILD_SUBREAPER in prctl(2)), also those in a session of their own.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from config.child_jobs import by_interpreter, describe_exit
from config.errors import UserError
from config.printable import shown
from launch.hosts import Hosts

KILL_AFTER_SECONDS = 15.0
"""How long processes that outlive their launcher have to end after SIGTERM before SIGKILL."""
LINGER_SECONDS = 60.0
"""How long a launcher may keep running after a rank was lost and none runs here. pdsh waits for ever for a machine that
is cut off; the deepspeed launcher and torchrun end within 30 s."""
_PR_SET_CHILD_SUBREAPER = 36
_KEPT_LINES = 400
_LOST_LINE = re.compile(r"error: (rank \d+ .*?); rank \d+ stops, exit code")
_TORCHRUN_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


class Job:
    """A launcher and its descendants."""

    def __init__(self, command: Sequence[str], hosts: Hosts | None = None, names: Sequence[str] = ()) -> None:
        """Start it in a session of its own, so that the terminal's signals reach only this process.

        names: the machines of `hosts` that it runs on, when it does not run here. Raises UserError when there is no
        such program.
        """
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._command, self._hosts, self._names = list(command), hosts, list(names)
        self._lost_at: float | None = None
        try:
            self._launcher = subprocess.Popen(
                by_interpreter(self._command),
                env=hosts.environment() if hosts else None,
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
        """Wait for the launcher, end what it left running, and return its exit code, negative for a signal."""
        while self._launcher.poll() is None:
            time.sleep(0.1)
            self._reap_orphans()
            lost = self._lost_at
            if lost is not None and time.monotonic() - lost > LINGER_SECONDS:
                self._lost_at = None
                if not dict(self._ranks()):  # else torchrun has started them again
                    log(f"the launcher still waits {LINGER_SECONDS:.0f} s after a rank was lost: ended")
                    self.kill()
        self._end_remaining()
        self._reader.join(timeout=5)
        return self._launcher.returncode

    def request_stop(self) -> bool:
        """Have the run save and end: SIGUSR1 to one rank, which all ranks follow. False when no rank runs here (yet).

        The launcher gets no signal: torchrun and the deepspeed launcher kill their ranks 30 s after one.
        """
        if self._hosts is not None:
            return self._hosts.signal_rank_0(self._names)
        ranks = self._single_process() or dict(self._ranks())
        for rank in sorted(ranks):
            with suppress(ProcessLookupError):
                os.kill(ranks[rank], signal.SIGUSR1)
                return True
        return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to every process of the job."""
        for pid in _descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def failure_cause(self) -> str | None:
        """What the output says about the rank that was lost: train.py's own line, else torchrun's report."""
        text = "".join(self._lines)
        ours = _LOST_LINE.findall(text)
        if ours:
            return str(ours[0])
        reported = self._torchrun_report()
        return f"rank {reported[0]} {describe_exit(reported[1])}" if reported else None

    def failed_code(self) -> int | None:
        """The exit code of the rank that failed first, where torchrun reports it."""
        reported = self._torchrun_report()
        return reported[1] if reported else None

    def _torchrun_report(self) -> tuple[int, int] | None:
        """Rank and exit code of the first failure."""
        found = _TORCHRUN_CAUSE.findall("".join(self._lines))
        return (int(found[-1][0]), int(found[-1][1])) if found else None

    def _read(self) -> None:
        assert self._launcher.stdout is not None
        for line in iter(self._launcher.stdout.readline, b""):
            text = line.decode(errors="replace")
            self._lines.append(text)
            if self._lost_at is None and _LOST_LINE.search(text):
                self._lost_at = time.monotonic()
            with suppress(OSError):
                sys.stdout.write(text)
                sys.stdout.flush()

    def _ranks(self) -> Iterator[tuple[int, int]]:
        """Rank and pid of every rank here. Its children inherit RANK, so the first in a line of descent counts."""
        seen: set[int] = set()
        for pid in _descendants(os.getpid()):  # parents first
            environment = _environment(pid)
            if "RANK" in environment and "LOCAL_RANK" in environment and int(environment["RANK"]) not in seen:
                seen.add(int(environment["RANK"]))
                yield int(environment["RANK"]), pid

    def _single_process(self) -> dict[int, int]:
        """Rank 0 when the command is `python train.py`, without a launcher; else empty.

        It names itself RANK 0 once it runs, which its environment here does not show, but that of its helpers does.
        """
        program, script = self._command[0], self._command[1]
        alone = Path(program).name.startswith("python") and script.endswith(".py")
        return {0: self._launcher.pid} if alone and self._launcher.returncode is None else {}

    def _reap_orphans(self) -> None:
        """Reap adopted processes that have ended: for one that stays a zombie DeepSpeed's launcher waits 30 s."""
        for pid in _children(os.getpid()):
            with suppress(ProcessLookupError, ChildProcessError):
                if pid != self._launcher.pid and os.getsid(pid) != os.getsid(0):  # in ours is ssh, waited for elsewhere
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


def log(line: str) -> None:
    """Write one line of the supervisor's own to stderr."""
    os.write(2, f"supervise: {shown(line)}\n".encode())  # a signal handler may be in the middle of another line


def _descendants(pid: int) -> list[int]:
    """Every descendant of `pid`, parents before their children."""
    found, queue = [], [pid]
    while queue:
        parent = queue.pop(0)
        queue += _children(parent)
        found.append(parent)
    return found[1:]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text(encoding="utf-8").split())
    return found


def _environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
