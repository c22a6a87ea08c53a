"""Ranks forked from one process that has imported what they need, for programs that start one job after another.

An interpreter takes about 7 s of a core to import torch, transformers and DeepSpeed, and a launcher two more; a fork
takes milliseconds. CUDA does not survive a fork, so this is for machines without a GPU.
"""

import ctypes
import gc
import json
import math
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from config.machine.processes import free_port
from training.start.process import leave

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.05
KILL_AFTER_SECONDS = 15.0
"""[seconds] Time between SIGTERM and SIGKILL for processes that outlive their launcher or a rank that failed."""


class Forks:
    """A copy of this process as it is now, from which the ranks of jobs are forked; it ends with this process.

    To be made before anything is computed: threads of OpenMP do not survive a fork.
    """

    def __init__(self, ranks: int, set_threads: Callable[[int], object]) -> None:
        """set_threads: `torch.set_num_threads`, since nothing in launch/ imports torch."""
        gc.collect()
        gc.freeze()  # imports stay, so no rank need look at them again
        self._jobs, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            self._jobs.close()
            _serve(theirs, ranks, set_threads)
        theirs.close()

    def start(self, program: Sequence[str], environment: Mapping[str, str], output: int) -> "ForkedJob":
        """Start `python PROGRAM ...` on all ranks; `output`: the file descriptor of their standard output and error."""
        ours, theirs = socket.socketpair()
        socket.send_fds(self._jobs, [b"job"], [theirs.fileno(), output])
        theirs.close()
        ours.sendall(json.dumps([[*program], {**environment}]).encode() + b"\n")
        return ForkedJob(program, ours)


class ForkedJob:
    """A running job, to be used as a subprocess.Popen of its launcher. The job ends with this process."""

    def __init__(self, program: Sequence[str], end: socket.socket) -> None:
        self.args, self._end = [*program], end
        self.pid = int.from_bytes(end.recv(4), "little")
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, that of the first rank that failed. Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            told = self._end.recv(4)
            self.returncode = int.from_bytes(told, "little", signed=True) if told else -signal.SIGKILL
            self._end.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal the launcher, with which the ranks end."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


def _serve(jobs: socket.socket, ranks: int, set_threads: Callable[[int], object]) -> NoReturn:
    """Fork a launcher for each job until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; whoever started the job ends it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps launchers
    while True:
        told, descriptors, *_ = socket.recv_fds(jobs, 8, 2)
        if not told:
            os._exit(0)
        if os.fork() == 0:
            jobs.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _launch(socket.socket(fileno=descriptors[0]), descriptors[1], ranks, set_threads)
        for descriptor in descriptors:
            os.close(descriptor)


def _launch(end: socket.socket, output: int, ranks: int, set_threads: Callable[[int], object]) -> NoReturn:
    """Fork the ranks, end all when one fails or nobody waits for them any more, and report the exit code."""
    end.sendall(os.getpid().to_bytes(4, "little"))
    with end.makefile("rb") as file:
        program, environment = json.loads(file.readline())
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    running = set()
    for rank in range(ranks):
        own = {**address, "LOCAL_WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        pid = os.fork()
        if pid == 0:
            end.close()
            environment = {"OMP_NUM_THREADS": "1", **environment, **own} if ranks > 1 else environment
            _run(program, environment, output, set_threads)
        running.add(pid)
    code, killed_at = 0, math.inf
    while running:
        gone = bool(select.select([end], [], [], _POLL_SECONDS)[0])  # it sends no more: the other end is closed
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            running.discard(ended[0])
            code = code or os.waitstatus_to_exitcode(ended[1])
        if gone or time.monotonic() > killed_at:
            signal_all(running, signal.SIGKILL)
        elif code and killed_at == math.inf:
            signal_all(running, signal.SIGTERM)
            killed_at = time.monotonic() + KILL_AFTER_SECONDS
        if gone:
            os._exit(1)
    end.sendall(code.to_bytes(4, "little", signed=True))
    os._exit(0)


def signal_all(pids: Iterable[int], number: int) -> None:
    """Signal these processes, unless they have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _run(
    program: Sequence[str], environment: Mapping[str, str], output: int, set_threads: Callable[[int], object]
) -> NoReturn:
    """Become the interpreter that runs a script, or a module after -m."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, encoding="utf-8", closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:  # which OpenMP read when it was imported
        set_threads(int(environment["OMP_NUM_THREADS"]))
    code: object = 1
    try:
        module = program[0] == "-m"
        sys.argv = [*program[module:]]
        if module:
            sys.modules.pop(program[1], None)
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    leave(code if isinstance(code, int) else int(code is not None))
