"""The state of a process that is not our child: whether it exists, how it ended, whether memory ran out. Linux only.

All of it is read from /proc and /sys/fs/cgroup; a file that cannot be read makes the answer unknown, never an error.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

from config.machine import processes
from config.machine.processes import cgroup_files, machine, pid_namespace, read, runs, start_ticks, stat_fields

_ENDED = "ZX"
# include/uapi/linux/pidfd.h: PIDFD_GET_INFO is _IOWR(0xFF, 11, struct pidfd_info), first version; exit_code is last.
_PIDFD_INFO_BYTES = 64
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO_BYTES << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3
_WORDS = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for a disk or a network file system"}


@dataclass(frozen=True)
class Member:
    """One process of the run, identified so that another process that reuses its pid is not mistaken for it."""

    rank: int
    host: str
    pid: int
    started: int
    """Clock ticks from boot to the start of the process; 0 if unknown."""
    machine: str
    """Identifies machine and pid namespace: equal for processes that see each other's pids."""

    @classmethod
    def here(cls, rank: int) -> Member:
        return cls.of(rank, os.getpid())

    @classmethod
    def of(cls, rank: int, pid: int) -> Member:
        return cls(rank, socket.gethostname(), pid, start_ticks(pid), f"{machine()} {pid_namespace()}")

    @property
    def alive(self) -> bool:
        """Whether it still runs. Only for a member on this machine."""
        return runs(self.pid, self.started)

    @property
    def standstill(self) -> str | None:
        """Human-readable reason why it is stopped or blocked; None if it runs, sleeps as usual, or has ended."""
        state = stat_fields(self.pid)
        return _WORDS.get(state[0]) if state and int(state[19]) == self.started else None

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


@dataclass(frozen=True)
class MemoryKills:
    """Number of processes killed by the kernel's out-of-memory killer: in this cgroup, and on the machine."""

    group: int | None
    machine: int | None

    @classmethod
    def now(cls) -> MemoryKills:
        """The current counters; None for one that cannot be read."""
        counters = (_counter(path, "oom_kill") for path in cgroup_files("memory.events", "memory.oom_control"))
        return cls(next((count for count in counters if count is not None), None), _counter("/proc/vmstat", "oom_kill"))

    def since(self, before: MemoryKills) -> str:
        """The most likely reason for a SIGKILL between `before` and now, by the counters, human-readable."""
        for here, earlier, where in ((self.group, before.group, "cgroup"), (self.machine, before.machine, "machine")):
            if here is not None and earlier is not None and here > earlier:
                return f"out of memory: this {where}'s count of out-of-memory kills rose from {earlier} to {here}"
        if self.machine is None:
            return "most often the machine ran out of memory"
        return "the kernel counted no out-of-memory kill here: most likely a person or the batch system"


def exit_status(member: Member, handle: int | None = None) -> int | None:
    """A process's exit code, or minus the signal that ended it; None if it has not ended, or its status is unknown.

    handle: a pidfd opened while it ran, through which Linux 6.15 and later keep the status. Before that the kernel
    keeps it only until the parent waits for the process, so call this at once.
    """
    state = stat_fields(member.pid)
    if state and state[0] in _ENDED and int(state[19]) == member.started:
        return _code(int(state[49]))
    if handle is None:
        return None
    info = bytearray(struct.pack("Q", _PIDFD_INFO_EXIT).ljust(_PIDFD_INFO_BYTES, b"\0"))
    with suppress(OSError):  # filled in when the parent waits, just before the zombie is reaped: hence this order
        fcntl.ioctl(handle, _PIDFD_GET_INFO, info)
        if struct.unpack_from("Q", info)[0] & _PIDFD_INFO_EXIT:
            return _code(struct.unpack_from("i", info, _PIDFD_INFO_BYTES - 4)[0])
    return None


def _code(status: int) -> int:
    """A wait status, as from waitpid(2), converted to subprocess's return code."""
    return -(status & 0x7F) if status & 0x7F else status >> 8


def describe_status(status: int | None) -> str:
    return "has ended for an unknown reason" if status is None else processes.describe_exit(status)


def describe_exit(member: Member, status: int | None, before: MemoryKills) -> str:
    """One line about a rank that ended on this machine. before: the kernel's counters at the start of the run."""
    text = f"{member} {describe_status(status)}, seen at {time.strftime('%H:%M:%S', time.gmtime())} UTC"
    if status == -signal.SIGKILL:
        return f"{text} ({MemoryKills.now().since(before)})"
    return f"{text} (its own output says why)" if status is not None and status > 0 else text


def _counter(path: str, name: str) -> int | None:
    for line in read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return None
