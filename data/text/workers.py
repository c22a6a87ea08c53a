"""Worker processes that compute while a thread of this process waits, and whose death is noticed at once.

`concurrent.futures.ProcessPoolExecutor` would do, except for two problems seen with Python 3.11. It keeps five named
semaphores in /dev/shm, which stay until the machine restarts if a whole job is killed. And it passes a new process its
arguments through a pipe of which it holds both ends: if the process is killed before it has read a tokenizer larger
than the pipe's buffer, the executor waits forever. Here every worker has one connection, which breaks with it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from config.machine.binding import unbind
from config.machine.processes import describe_exit

_START_SECONDS = 300.0
"""Time for a new process to make its function."""


class WorkerDied(Exception):
    """A worker process has ended by itself or did not answer in time; the text says how."""


class Workers:
    """At most `count` processes, started on demand: fresh interpreters, on all cores this process may use."""

    def __init__(self, count: int, make: Callable[..., Callable[[Any], Any]], *arguments: object) -> None:
        """make: called with `arguments` in each process; returns the function to apply. Both are pickled."""
        self._setup = (make, arguments)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="worker")  # one waits for each process
        self._own = threading.local()
        self._started: list[tuple[SpawnProcess, Connection]] = []
        self._starting = threading.Lock()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes, whatever they are doing, and wait for them."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._starting:
            for process, _ in self._started:
                _kill(process)
        self._threads.shutdown(wait=True)
        for process, connection in self._started:
            _kill(process)
            process.join()
            connection.close()

    def submit(self, item: Any, seconds: float | None = None) -> Future[Any]:
        """Apply the function in a process. The result raises what the function raised there, or WorkerDied. seconds:
        time limit, after which the process is killed."""
        return self._threads.submit(self._compute, item, seconds)

    def _compute(self, item: Any, seconds: float | None) -> Any:
        if not hasattr(self._own, "worker"):
            self._own.worker = self._start()
        process, connection = self._own.worker
        try:
            connection.send(item)
            if not connection.poll(seconds):
                raise TimeoutError
            good, result = connection.recv()
        except (EOFError, OSError) as error:  # OSError: killed in the middle of an answer
            del self._own.worker  # the next item gets another one
            late = isinstance(error, TimeoutError)
            if late:
                _kill(process)
            how = self._ended(process, connection)
            raise WorkerDied("no answer in time" if late else f"a worker process {how}") from error
        if not good:
            raise result
        return result

    def _ended(self, process: SpawnProcess, connection: Connection) -> str:
        """How a process has ended, or is about to; what is open for it is then closed."""
        process.join(timeout=5)
        with self._starting:  # a start in another thread may have reaped it and not have noted its exit code yet
            if process.exitcode is None:
                return "has ended"
            how = describe_exit(process.exitcode)
            self._started.remove((process, connection))
            connection.close()
            process.close()
        return how

    def _start(self) -> tuple[SpawnProcess, Connection]:
        with self._starting:  # multiprocessing keeps its list of children without a lock
            context = multiprocessing.get_context("spawn")
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._started.append((process, mine))
        unbind(process.pid or 0)
        with suppress(OSError, EOFError):  # it is dead already, which the first item will show
            mine.send(self._setup)
            if mine.poll(_START_SECONDS):
                mine.recv()
            else:
                _kill(process)
        return process, mine


def _kill(process: SpawnProcess) -> None:
    """Kill a process that may have ended, and what it started where it leads a session."""
    if process.is_alive() and process.pid:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def _serve(connection: Connection) -> None:
    """Compute one item after another until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, ConnectionError):  # the parent is done
        make, arguments = connection.recv()
        function = make(*arguments)
        connection.send(None)  # it has its function
        while True:
            item = connection.recv()
            try:
                result = (True, function(item))
            except Exception as error:
                result = (False, error)
            connection.send(result)


def _end_with_parent() -> None:
    """End this process when its parent ends, even in the middle of an item."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        signal.raise_signal(signal.SIGKILL)
