"""Processes that start with torch, DeepSpeed and Mantissa imported, by a fork server that has done so once.

A new interpreter takes about ten seconds of a core for these imports, a fork takes milliseconds.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from subprocess import TimeoutExpired
from unittest.mock import patch

from config.cli import REPOSITORY
from config.machine.processes import free_port


def context() -> BaseContext:
    """Starts such processes. Where there is a GPU they start from nothing: CUDA does not survive a fork."""
    if Path("/dev/nvidia0").exists():
        return multiprocessing.get_context("spawn")
    # The server looks for modules on PYTHONPATH only.
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    # With more, inductor starts interpreters of its own in every rank that compiles, to compile a block or two.
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths), **threads):
        forkserver.set_forkserver_preload(["tests.support.jobs.preloaded"])
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


class Job:
    """`python SCRIPT ...` or `python -m MODULE ...`, on one rank or several; to be used as a Popen of rank 0 is."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], ranks: int) -> None:
        file, self._log = tempfile.mkstemp(prefix="mantissa-job-")
        os.close(file)
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self._processes = []
        for rank in map(str, range(ranks)):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(ranks), **address} if ranks > 1 else {}
            task = (list(arguments[1:]), {**environment, **place}, self._log)
            self._processes.append(context().Process(target=_run, args=task))
            self._processes[-1].start()
        self.pids = [process.pid for process in self._processes]
        self.pid = self.pids[0]

    @property
    def exit_codes(self) -> list[int | None]:
        """Exit codes by rank; None for one that runs."""
        return [process.exitcode for process in self._processes]

    @property
    def returncode(self) -> int | None:
        codes = self.exit_codes
        return None if None in codes else next(filter(None, codes), 0)

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill every rank that still runs."""
        for process in self._processes:
            process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for the end; what it printed. Raises TimeoutExpired."""
        for process in self._processes:
            process.join(timeout)
        if self.returncode is None:
            raise TimeoutExpired("a forked job", timeout or 0.0, Path(self._log).read_text())
        output = Path(self._log).read_text()
        Path(self._log).unlink()
        return output, None


def _run(arguments: list[str], environment: dict[str, str], log: str) -> None:
    os.setsid()
    os.chdir(REPOSITORY)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
