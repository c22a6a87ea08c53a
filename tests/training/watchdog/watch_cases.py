"""Scenarios of test_watch.py, each in processes of its own, since some ranks do not survive."""

import contextlib
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from config.cli import CONFIG_ERROR
from config.errors import UserError, report_error
from config.machine.members import Member
from config.machine.processes import free_port
from tests.support.jobs import forked
from training import distributed
from training.distributed import World
from training.watchdog import watch as lost_rank

WORLD = 2


def killed_beside_its_witness(world: World) -> None:
    """Rank 1 is killed once the process beside it listens to no SIGTERM any more, and has had a moment to go on."""
    if world.rank == 1:
        while not any(_ignores_sigterm(child) for child in _children()):
            time.sleep(0.05)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    world.wait_for_all()


def _children() -> list[str]:
    return [word for path in Path("/proc/self/task").glob("*/children") for word in path.read_text().split()]


def _ignores_sigterm(process: str) -> bool:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        ignored = next(line.split()[1] for line in lines if line.startswith("SigIgn"))
        return bool(int(ignored, 16) & 1 << signal.SIGTERM - 1)
    return False


def killed_while_the_other_computes(world: World) -> None:
    """Rank 1 crashes; rank 0 comes to no collective, as one that waits inside NCCL does not come back."""
    if world.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)


def failed(world: World) -> None:
    """Rank 1 has a bug, and takes long to go."""
    if world.rank == 1:
        raise ValueError("a bug of our own")
    world.wait_for_all()


def failed_both(world: World) -> None:
    """A bug that every rank has, with a word in it that failed collectives use as well."""
    raise RuntimeError("Connection of layers is wrong")


def mistaken(world: World, late: int) -> None:
    """A user's mistake that every rank meets, one of them long after the other, and nobody ends the others."""
    if world.rank == late:
        time.sleep(lost_rank.WAIT_SECONDS + 1)
    raise UserError("no such folder")


rank_0_late, rank_1_late = partial(mistaken, late=0), partial(mistaken, late=1)
rank_0_gone = rank_1_late  # and rank 0 takes the store with it


def stopped(world: World) -> None:
    """Rank 1 stands still until the collective's time-out."""
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    world.wait_for_all()


def absent(world: World) -> None:
    """Rank 1 is well, but does not come to the collective before its time-out."""
    if world.rank == 1:
        time.sleep(60)
    world.wait_for_all()


def fine(world: World) -> None:
    """Rank 0 is long in leaving, rank 1 is not missed."""
    world.wait_for_all()
    if world.rank == 0:
        time.sleep(3)


def _rank(scenario: str, rank: int, port: int, log: str, elsewhere: bool, timeout: float) -> None:
    """One rank: its error output goes to the file `log`, its exit code is train.py's."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    lost_rank.GRACE_SECONDS = 2.0
    lost_rank.BEAT_SECONDS = 2.0 if scenario == "failed_both" else 0.5  # a busy machine's ranks fail seconds apart
    lost_rank.SILENCE_SECONDS = 1.0 if scenario in ("stopped", "fine") else 30.0  # a busy machine is silent for seconds
    if elsewhere:  # as if every rank had a machine of its own: nothing but the store tells of the others
        here = Member.here(rank)
        Member.here = classmethod(lambda cls, rank: replace(here, machine=f"machine {rank}"))  # type: ignore[assignment,method-assign]
    torch.set_num_threads(1)
    world = distributed.start(rank=rank, world_size=WORLD, local_rank=rank, timeout_minutes=timeout / 60)
    try:
        with lost_rank.watched(world):
            globals()[scenario](world)
    except lost_rank.LostRank:
        os._exit(lost_rank.LOST)
    except UserError as error:
        report_error(error, rank)
        time.sleep(0.0 if scenario == "rank_0_gone" else lost_rank.WAIT_SECONDS + 2)
        os._exit(CONFIG_ERROR)
    sys.stderr.flush()


class Ranks:
    """Starts scenarios from a server that has imported everything, and waits for how each rank ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(
        self, scenario: str, *, elsewhere: bool = False, timeout: float = 30.0, longer: float = 1.0
    ) -> tuple[list[Any], list[str], float]:
        """Exit codes and error output by rank, and the seconds until rank 0 ended. Whoever is left is killed after
        `longer` seconds."""
        port = free_port()
        logs = [self._folder / f"{scenario}-{rank}.log" for rank in range(WORLD)]
        ranks = [
            forked.context().Process(target=_rank, args=(scenario, rank, port, str(logs[rank]), elsewhere, timeout))
            for rank in range(WORLD)
        ]
        for rank in ranks:
            rank.start()
        began = time.monotonic()
        ranks[0].join(timeout=90)
        seconds = time.monotonic() - began
        ranks[1].join(timeout=longer)
        for rank in ranks:
            with contextlib.suppress(ValueError):
                rank.kill()
            rank.join()
        return [rank.exitcode for rank in ranks], [log.read_text() for log in logs], seconds
