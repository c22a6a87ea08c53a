"""Where DeepSpeed's ops are built, and the locks of their builds. The standard library only.

torch builds an op under a lock file, and waits for an existing one for ever and silently. A building process keeps the
file open (`torch.utils.file_baton`), so a lock that no process has open was left by a killed build; but processes of
other containers and machines cannot be seen. training/build_locks.py removes such locks.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs")
"""File systems of one machine only."""


def extensions_folder() -> Path:
    """Where this environment's ops are built: TORCH_EXTENSIONS_DIR, else a folder of its own in torch's cache.

    Ops of two environments in one folder would replace each other at every start, a minute of building each time: the
    paths of the compiler's command line, and the libraries that an op is linked with, are an environment's own.
    """
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given).expanduser()
    versions = [f"python-{sys.version_info.major}.{sys.version_info.minor}"]
    for package in ("torch", "deepspeed"):
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{package}-{metadata.version(package)}")
    prefix = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or "/nonexistent") / ".cache")
    return cache / "torch_extensions" / "_".join([*versions, prefix])


def use_own_folder() -> None:
    """Have torch build and look for ops in `extensions_folder`, in this process and those that it starts."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions_folder())


def locks(folder: Path, op: str = "*") -> list[dict[str, Any]]:
    """Locks of builds of `op`: path, pid of the holder or None, age in seconds, and whether the pid is `unsure`."""
    found = {str(path.resolve()): path for path in folder.glob(f"**/{op}/lock")}
    holders = _open_files() if found else {}
    hidden = bool(found) and None in compilers()
    facts = []
    for real, path in found.items():
        try:
            age = time.time() - path.stat().st_mtime
        except OSError:  # its build has just ended
            continue
        unsure = hidden or not is_local(path)
        facts.append({"path": str(path), "pid": holders.get(real), "age": age, "unsure": unsure})
    return facts


def _open_files() -> dict[str, int]:
    """Path of each open file to the pid of a process that has it open, among visible processes."""
    holders: dict[str, int] = {}
    for entry in Path("/proc").glob("[0-9]*/fd"):
        try:
            for link in entry.iterdir():
                holders.setdefault(str(link.readlink()), int(entry.parent.name))
        except OSError:
            continue
    return holders


def compilers() -> list[str | None]:
    """Working folder of each compiler that runs on this machine; None where it cannot be read."""
    found: list[str | None] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_bytes().strip() in (b"ninja", b"cc1plus", b"nvcc", b"cicc", b"ptxas"):
                found.append(str((process / "cwd").readlink()))
        except PermissionError:
            found.append(None)
        except OSError:  # it has ended
            continue
    return found


def is_local(path: Path) -> bool:
    """Whether the path is on a file system that no other machine writes to."""
    return mount_of(path)["filesystem"] in _LOCAL


def mount_of(path: Path) -> dict[str, str]:
    """The file system that holds `path`, as /proc/self/mounts names it."""
    best = ("", "?")
    for line in os.fsdecode(Path("/proc/self/mounts").read_bytes()).splitlines():
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        if (path.resolve() == Path(point) or Path(point) in path.resolve().parents) and len(point) >= len(best[0]):
            best = (point, kind)
    return {"mount": best[0], "filesystem": best[1]}
