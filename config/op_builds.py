"""Where DeepSpeed's ops are built, and the locks of builds that were killed. The standard library only.

torch builds an op under a lock file and waits for a lock that is there, for ever and without a word. Who builds keeps
the file open (`torch.utils.file_baton`), so a lock that no process has open was left by a build that was killed.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

YOUNG_SECONDS = 120.0
"""A build that changed a file this short ago may belong to a process that cannot be seen: one of another container."""
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs")
"""File systems that no other machine writes to."""


def extensions_folder() -> Path:
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")).expanduser()


def locks(folder: Path, op: str = "*") -> list[dict[str, Any]]:
    """Locks of builds of `op`: path, pid of who holds it or None, age in seconds, and whether that pid is `unsure`."""
    found = {str(path.resolve()): path for path in folder.glob(f"**/{op}/lock")}
    holders, hidden = _open_files() if found else ({}, False)
    facts = []
    for real, path in found.items():
        try:
            age = time.time() - path.stat().st_mtime
        except OSError:  # its build ended just now
            continue
        unsure = (hidden and _compiling()) or mount_of(path)["filesystem"] not in _LOCAL
        facts.append({"path": str(path), "pid": holders.get(real), "age": age, "unsure": unsure})
    return facts


def clear_abandoned(op: str, say: Callable[[str], None], young_seconds: float = YOUNG_SECONDS) -> None:
    """Remove the lock that a killed build of `op` left, and come back when this process may build or wait.

    One process of a machine does it at a time: a lock that is taken meanwhile has a holder and stays. A lock of a
    build whose files changed within `young_seconds` is looked at again when they are older. `say` gets one line on
    what was removed or is waited for.
    """
    folder = extensions_folder()
    said = set()

    def tell(line: str) -> None:
        if line not in said:
            say(line)
        said.add(line)

    while True:
        with _alone(folder):
            young = [lock for lock in locks(folder, op) if not _settled(lock, tell, young_seconds)]
        if not young:
            return
        time.sleep(0.5)


def _settled(lock: dict[str, Any], say: Callable[[str], None], young_seconds: float) -> bool:
    """Whether nothing more is to be done about a lock: it is somebody's, perhaps, or it was removed."""
    path = Path(lock["path"])
    op = path.parent.name
    if lock["pid"] is not None:
        say(f"waiting for {path}: process {lock['pid']} builds {op}")
        return True
    if lock["unsure"]:
        say(f"waiting for {path}: another process builds {op}; if none does, on any machine, remove that file")
        return True
    try:
        age = time.time() - max(file.stat().st_mtime for file in path.parent.iterdir())
    except OSError:  # files of a build that goes on
        return False
    if age < young_seconds:
        say(f"waiting for {path}: nobody here holds it; it is removed when its build is {young_seconds:.0f} s old")
        return False
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        say(f"waiting for {path}, which a killed build left: {error.strerror}; remove it")
    else:
        say(f"removed {path}: the build of {op} that left it was killed")
    return True


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process of this machine at a time; a folder that cannot be locked or written to is used as it is."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _open_files() -> tuple[dict[str, int], bool]:
    """Path of each open file to a process that has it, and whether some processes' files cannot be seen."""
    holders: dict[str, int] = {}
    hidden = False
    for entry in Path("/proc").glob("[0-9]*/fd"):
        try:
            for link in entry.iterdir():
                holders.setdefault(str(link.readlink()), int(entry.parent.name))
        except PermissionError:
            hidden = True
        except OSError:
            continue
    return holders, hidden


def _compiling() -> bool:
    """Whether anybody compiles on this machine."""
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            if path.read_text().strip() in ("ninja", "cc1plus", "nvcc", "cicc", "ptxas"):
                return True
    return False


def mount_of(path: Path) -> dict[str, str]:
    """The file system that holds `path`, as /proc/self/mounts names it."""
    best = ("", "?")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        if (path.resolve() == Path(point) or Path(point) in path.resolve().parents) and len(point) >= len(best[0]):
            best = (point, kind)
    return {"mount": best[0], "filesystem": best[1]}
