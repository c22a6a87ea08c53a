"""A group of real processes that stays up and runs one test function after another.

Joining a group takes a moment, so the processes are started once. A function that
fails returns its traceback; one that hangs past the time-out costs the group, which is then restarted.
"""

import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from config.machine.processes import free_port
from tests.support.jobs import forked

START_SECONDS = 240.0
"""On a machine that other tests keep busy."""


class ProcessGroup:
    """`world_size` spawned processes in one gloo group. Functions must be importable by name."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._workers: list[tuple[Any, Connection]] = []
        self._known: dict[str, list[Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def run(self, function: Callable[..., Any], *, seconds: float = 180.0, **arguments: Any) -> list[Any]:
        """Call `function(world, **arguments)` on every rank; the results in rank order.

        Raises AssertionError with the rank's traceback when one fails or takes longer than `seconds`.
        """
        if not self._workers:
            self._start()
        for _, pipe in self._workers:
            pipe.send((function, arguments))
        results, problems = [], []
        for rank, (_, pipe) in enumerate(self._workers):
            if not pipe.poll(seconds):
                problems.append(f"rank {rank} did not answer within {seconds:.0f} s")
                continue
            good, value = pickle.loads(pipe.recv_bytes())
            (results if good else problems).append(value if good else f"rank {rank}:\n{value}")
        if problems:
            self._stop()  # the ranks may now be at different collectives
            raise AssertionError("\n".join(problems))
        return results

    def once(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """As `run`, but only the first time with these arguments: for what several tests are compared with."""
        what = f"{function.__module__}.{function.__qualname__}{sorted(arguments.items())}"
        if what not in self._known:
            self._known[what] = self.run(function, **arguments)
        return self._known[what]

    def _start(self) -> None:
        port = free_port()
        context = forked.context()
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.world_size, port), daemon=True)
            process.start()
            self._workers.append((process, mine))
        for rank, (_, pipe) in enumerate(self._workers):
            assert pipe.poll(START_SECONDS), f"rank {rank} did not start"
            good, value = pickle.loads(pipe.recv_bytes())
            assert good, value

    def _stop(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []


def _answer(pipe: Connection, good: bool, value: Any) -> None:
    """Tensors go by value.

    `send` would share their memory, which costs a file descriptor each for as long as they live: a user has 1,024.
    """
    pipe.send_bytes(pickle.dumps((good, value)))


def _serve(pipe: Connection, rank: int, world_size: int, port: int) -> None:
    multiprocessing.current_process().daemon = False  # it starts processes of its own, as train.py does
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    try:
        import torch
        from huggingface_hub import constants

        from training import distributed

        constants.HF_HUB_OFFLINE = True  # its client tries for half a minute where there is no network

        torch.set_num_threads(1)
        world = distributed.start(rank=rank, world_size=world_size, local_rank=rank)
        _answer(pipe, True, None)
    except BaseException:
        _answer(pipe, False, traceback.format_exc())
        return
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            _answer(pipe, True, function(world, **arguments))
        except BaseException:
            _answer(pipe, False, traceback.format_exc())
        sys.stdout.flush()
