"""One start of a training job through its launcher: its output, its processes, and an end that leaves none behind.

A launcher can die and leave its ranks running: the deepspeed launcher does on SIGTERM. So every process that comes of
it is kept within reach (PR_SET_CHILD_SUBREAPER in prctl(2)), also those that moved to a session of their own.
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

from config.errors import UserError
from launch.hosts import Hosts

KILL_AFTER_SECONDS = 15.0
"""How long processes that outlive their launcher have to end after SIGTERM; then SIGKILL."""
LINGER_SECONDS = 60.0
"""How long a launcher may stand after a rank was lost and none runs here. pdsh waits for ever for a machine that is cut
off; the deepspeed launcher and torchrun end within 30 s."""
_PR_SET_CHILD_SUBREAPER = 36
_KEPT_LINES = 400
_LOST_LINE = re.compile(r"error: (rank \d+ .*?); rank \d+ stops, exit code")
_TORCHRUN_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


class Job:
    """A launcher and the processes that come of it."""

    def __init__(self, command: Sequence[str], hosts: Hosts | None = None, names: Sequence[str] = ()) -> None:
        """Start it in a session of its own: what the terminal sends comes to us alone.

        names: the machines of `hosts` that it runs on, when it does not run here. Raises UserError when there is no
        such program.
        """
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._command, self._hosts, self._names = list(command), hosts, list(names)
        self._lost_at: float | None = None
        try:
            self._launcher = subprocess.Popen(
                self._command,
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
        """Wait for the launcher, end what it left behind, and return its exit code; minus a signal's number."""
        while self._launcher.poll() is None:
            time.sleep(0.1)
            lost = self._lost_at
            if lost is not None and time.monotonic() - lost > LINGER_SECONDS:
                self._lost_at = None
                if not dict(self._ranks()):  # else torchrun has started them again
                    say(f"the launcher still waits {LINGER_SECONDS:.0f} s after a rank was lost: ended")
                    self.kill()
        self._end_the_rest()
        self._reader.join(timeout=5)
        return self._launcher.returncode

    def ask_to_stop(self) -> bool:
        """Have the run save and end: SIGUSR1 to one rank, and all ranks agree. False when no rank runs here (yet).

        The launcher is not asked: torchrun and the deepspeed launcher kill a rank 30 s after they were told to stop.
        """
        if self._hosts is not None:
            return self._hosts.tell(self._names)
        ranks = dict(self._ranks()) or self._without_launcher()
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

    def cause(self) -> str | None:
        """What the output says about the rank that was lost: our own line, else the launcher's report."""
        text = "".join(self._lines)
        ours = _LOST_LINE.findall(text)
        if ours:
            return str(ours[0])
        reported = self._reported()
        return f"rank {reported[0]} {ended_how(reported[1])}" if reported else None

    def failed_code(self) -> int | None:
        """The exit code of the rank that failed first, where the launcher's report has it."""
        reported = self._reported()
        return reported[1] if reported else None

    def _reported(self) -> tuple[int, int] | None:
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
        """Rank and process of every rank here. What a rank starts inherits its RANK, so the first in a line counts."""
        seen: set[int] = set()
        for pid in _descendants(os.getpid()):  # parents first
            environment = _environment(pid)
            if "RANK" in environment and "LOCAL_RANK" in environment and int(environment["RANK"]) not in seen:
                seen.add(int(environment["RANK"]))
                yield int(environment["RANK"]), pid

    def _without_launcher(self) -> dict[int, int]:
        """`python train.py` is itself the one rank."""
        program, script = self._command[0], self._command[1]
        alone = Path(program).name.startswith("python") and script.endswith(".py")
        return {0: self._launcher.pid} if alone and self._launcher.returncode is None else {}

    def _end_the_rest(self) -> None:
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
            self._hosts.end(self._names)


def say(line: str) -> None:
    """One line of the supervisor's own, among those of the job."""
    os.write(2, f"supervise: {line}\n".encode())  # a signal handler may be in the middle of another line


def ended_how(code: int) -> str:
    """An exit code, or minus a signal's number, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _descendants(pid: int) -> list[int]:
    """Every process that comes of `pid`, parents before their children."""
    found, next_ones = [], [pid]
    while next_ones:
        one = next_ones.pop(0)
        for path in Path(f"/proc/{one}/task").glob("*/children"):
            with suppress(OSError):
                next_ones += [int(child) for child in path.read_text().split()]
        found.append(one)
    return found[1:]


def _environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
