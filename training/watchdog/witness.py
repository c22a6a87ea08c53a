"""Says over a rank's connections how that rank ended, when it cannot any more: a small process beside it.

A rank alone on its machine has nobody there whom the kernel would tell. Standard library only: it starts in no time.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from training.watchdog.process import Member, MemoryKills, exit_status, obituary

_REPOSITORY = Path(__file__).resolve().parents[2]
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from training.watchdog.witness import main; main(sys.argv[2:])"


def start_witness(rank: int, links: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
    """Start it beside this process. It shares the connections `links`, and ends with this process."""
    numbers = [link.fileno() for link in links]
    return subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _PROGRAM,
            str(_REPOSITORY),
            str(rank),
            str(os.getpid()),
            *map(str, numbers),
        ],
        pass_fds=numbers,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # a launcher waits until nobody holds the rank's output any more
        stderr=subprocess.DEVNULL,
    )


def main(arguments: Sequence[str]) -> None:
    """arguments: the rank, its process, file descriptors of its connections. Returns when the process has ended."""
    for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(kind, signal.SIG_IGN)  # what is sent to all processes of a job; it goes with its rank
    rank, pid, *numbers = map(int, arguments)
    kills, member = MemoryKills.now(), Member.of(rank, pid)
    handle = os.pidfd_open(pid)
    if os.getppid() == pid:
        select.select([handle], [], [])
    status = exit_status(member, handle)
    words = f"{'' if status is None else status} {obituary(member, status, kills)}"
    for number in numbers:
        with suppress(OSError):  # that one has gone before
            socket.socket(fileno=number).sendall(words.encode())
