"""Processes of this machine as seen in /proc, and the launchers above this one. Standard library, Linux.

A file that cannot be read, as on another system, makes the answer empty and is never an error.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_LAUNCHERS = {
    "deepspeed": ("deepspeed", "deepspeed.pt", "ds", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
    "torchrun": ("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    "accelerate": (
        "accelerate",
        "accelerate-launch",
        "accelerate.commands.accelerate_cli",
        "accelerate.commands.launch",
    ),
    "launch.supervise": ("launch.supervise",),
    "mpirun": ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "orted", "prted", "hydra_pmi_proxy"),
}
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs")
"""File systems local to one machine."""
_NAME_OF = {program: name for name, programs in _LAUNCHERS.items() for program in programs}
DEEPSPEED_NODE = "deepspeed.launcher.launch"
"""The part of DeepSpeed's launcher that starts the ranks of one machine."""


@dataclass(frozen=True)
class Launcher:
    """A launcher among this process's ancestors."""

    name: str
    """deepspeed, torchrun, accelerate, launch.supervise or mpirun."""
    program: str
    """The program or module it runs, such as deepspeed.launcher.launch."""
    pid: int
    started: int
    words: tuple[str, ...]
    """Its command line as a user would write it: `deepspeed --num_gpus 2 ...`, `python -m launch.supervise ...`."""


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third, the state; empty if there is no such process."""
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def start_ticks(pid: int) -> int:
    """Clock ticks from boot to the start of the process, which distinguish it from a later one with the same pid."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


def runs(pid: int, started: int) -> bool:
    """Whether the process that started at these clock ticks still runs."""
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in "ZX" and int(fields[19]) == started


def machine() -> str:
    """An id of this machine since its boot."""
    return read("/proc/sys/kernel/random/boot_id").strip() or socket.gethostname()


def pid_namespace() -> str:
    """An id of the namespace in which pids are unique."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def read(path: str | Path) -> str:
    """A file's text; empty when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cgroup_files(name: str, version_1: str) -> Iterator[str]:
    """Paths of a file about memory in this process's cgroup and those around it. version_1: its name in version 1."""
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder, file = Path(f"/sys/fs/cgroup{path}"), name
        elif "memory" in controllers.split(","):
            folder, file = Path(f"/sys/fs/cgroup/memory{path}"), version_1
        else:
            continue
        yield from (f"{one}/{file}" for one in (folder, *folder.parents))


def launchers() -> list[Launcher]:
    """The launchers above this process, nearest first; none if its parent is not one."""
    found, pid = list[Launcher](), os.getppid()
    while pid > 1:
        started, line = start_ticks(pid), read(f"/proc/{pid}/cmdline")
        words = as_written(line.split("\0")[:-1])
        program = words[2] if words[1:2] == ["-m"] and len(words) > 2 else "".join(words[:1])
        if program not in _NAME_OF:
            break
        found.append(Launcher(_NAME_OF[program], program, pid, started, tuple(words)))
        fields = stat_fields(pid)
        pid = int(fields[1]) if fields else 0
    return found


def as_written(command: Sequence[str]) -> list[str]:
    """A command line without folders, and without the interpreter before a script unless started by its path."""
    words = list(command)
    if words and Path(words[0]).name.startswith("python"):
        del words[0]
        while words and words[0].startswith("-") and words[0] != "-m":
            del words[: 2 if words[0] in ("-X", "-W") else 1]
        if words and words[0] == "-m":
            return [command[0] if "/" in command[0] else "python", *words]
    return [Path(words[0]).name, *words[1:]] if words else []


def free_port() -> int:
    """A port of this machine that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def describe_exit(code: int) -> str:
    """A human-readable exit code, such as "was killed by SIGKILL"; negative for a signal, as in subprocess."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def peak_resident_bytes(process: str) -> int:
    """Peak resident set of a process by id, or of this one for "self"; 0 if it has ended."""
    _, _, peak = read(f"/proc/{process}/status").partition("VmHWM:")
    return int(peak.split(maxsplit=1)[0]) * 1024 if peak else 0


def is_local(path: Path) -> bool:
    """Whether the path is on a file system local to this machine."""
    return mount_of(path)["filesystem"] in _LOCAL


def mount_of(path: Path) -> dict[str, str]:
    """The file system that holds `path`, as listed in /proc/self/mounts."""
    best = ("", "?")
    for line in os.fsdecode(Path("/proc/self/mounts").read_bytes()).splitlines():
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        if (path.resolve() == Path(point) or Path(point) in path.resolve().parents) and len(point) >= len(best[0]):
            best = (point, kind)
    return {"mount": best[0], "filesystem": best[1]}
