"""A small process beside a rank that is alone on its machine, which tells the others how that rank ended. It uses the
standard library only, so that it starts at once."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from config.machine.members import Member, MemoryKills, describe_exit, exit_status

_REPOSITORY = Path(__file__).resolve().parents[2]
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from training.watchdog.witness import main; main(sys.argv[2:])"


def start_witness(rank: int, links: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
    """Start a witness, which shares the connections `links` and ends with this process."""
    numbers = [link.fileno() for link in links]
    arguments = [str(_REPOSITORY), str(rank), str(os.getpid()), *map(str, numbers)]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM, *arguments],
        pass_fds=numbers,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # a launcher waits until no process holds the rank's output any more
        stderr=subprocess.DEVNULL,
    )


def main(arguments: Sequence[str]) -> None:
    """arguments: the rank, its process, file descriptors of its connections. Returns when the process has ended."""
    for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(kind, signal.SIG_IGN)  # sent to all processes of a job, but a witness ends only with its rank
    rank, pid, *numbers = map(int, arguments)
    kills, member = MemoryKills.now(), Member.of(rank, pid)
    handle = os.pidfd_open(pid)
    if os.getppid() == pid:
        select.select([handle], [], [])
    status = exit_status(member, handle)
    message = f"{'' if status is None else status} {describe_exit(member, status, kills)}"
    for number in numbers:
        with suppress(OSError):  # the other end has already closed it
            socket.socket(fileno=number).sendall(message.encode())
