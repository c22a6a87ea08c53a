"""Where DeepSpeed's ops are built, and the locks of builds that were killed. The standard library only.

torch builds an op under a lock file and waits for a lock that is there, for ever and without a word. Who builds keeps
the file open (`torch.utils.file_baton`), so a lock that no process has open was left by a build that was killed; but
processes of other containers and machines cannot be seen. So who builds here also holds a file of Mantissa's locked,
in a way that ends with the process: one that says of a build and is not held any more is a killed build's.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

YOUNG_SECONDS = 900.0
"""A build that changed a file this short ago may belong to a process that cannot be seen: one of another container,
which did not say that it builds. A file of DeepSpeed's takes six minutes to compile on a busy machine."""
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs")
"""File systems that no other machine writes to."""


def extensions_folder() -> Path:
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")).expanduser()


def locks(folder: Path, op: str = "*") -> list[dict[str, Any]]:
    """Locks of builds of `op`: path, pid of who holds it or None, age in seconds, and whether that pid is `unsure`."""
    found = {str(path.resolve()): path for path in folder.glob(f"**/{op}/lock")}
    holders = _open_files() if found else {}
    out_of_sight = bool(found) and None in _compilers()
    facts = []
    for real, path in found.items():
        try:
            age = time.time() - path.stat().st_mtime
        except OSError:  # its build ended just now
            continue
        unsure = out_of_sight or mount_of(path)["filesystem"] not in _LOCAL
        facts.append({"path": str(path), "pid": holders.get(real), "age": age, "unsure": unsure})
    return facts


@contextmanager
def alone(op: str, say: Callable[[str], None]) -> Iterator[None]:
    """The only process of Mantissa on this machine that builds or loads `op`, with no lock in its way that is nobody's.

    A lock of a build that did not say so, and whose files changed within YOUNG_SECONDS, is waited for until they are
    older. `say` gets one line on what is waited for or was removed.
    """
    with _mark(op, say) as mark:
        killed = mark is not None and bool(os.pread(mark, 1, 0))
        clear_abandoned(op, say, young_seconds=0.0 if killed else YOUNG_SECONDS)
        built = any(extensions_folder().glob(f"**/{op}.so"))
        if mark is not None:
            os.pwrite(mark, b"loads\n" if built else b"builds\n", 0)
        try:
            yield
        finally:
            if mark is not None:
                os.ftruncate(mark, 0)


def clear_abandoned(op: str, say: Callable[[str], None], young_seconds: float = YOUNG_SECONDS) -> None:
    """Remove locks that killed builds of `op` left. Returns when there is none, or one that is somebody's, perhaps."""
    said = set()

    def tell(line: str) -> None:
        if line not in said:
            say(line)
        said.add(line)

    while not all(_settled(lock, tell, young_seconds) for lock in locks(extensions_folder(), op)):
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
    if str(path.parent.resolve()) in _compilers():
        say(f"waiting for what a killed build left running in {path.parent}")
        return False
    try:
        before = path.stat()
        age = time.time() - max(file.stat().st_mtime for file in path.parent.iterdir())
    except OSError:  # files of a build that goes on
        return False
    if age < young_seconds:
        when = f"it is removed when its build is {young_seconds:.0f} s old"
        say(f"waiting for {path}: nobody here holds it; {when}; if no container builds {op}, remove it")
        return False
    try:
        if path.stat().st_ino != before.st_ino:
            return False
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        say(f"waiting for {path}, which a killed build left: {error.strerror}; remove it")
    else:
        say(f"removed {path}: the build of {op} that left it was killed")
    return True


@contextmanager
def _mark(op: str, say: Callable[[str], None]) -> Iterator[int | None]:
    """A file that says whether `op` is being built, held by one process at a time; None where that cannot be had."""
    folder = extensions_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark = os.open(folder / f".{op}.mantissa", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        yield None
        return
    try:
        yield mark if _hold(mark, lambda: say(f"waiting for another process, which builds {op}")) else None
    finally:
        os.close(mark)


def _hold(mark: int, tell: Callable[[], None]) -> bool:
    """Wait until nobody else holds the file; False on a file system without locks."""
    try:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if os.pread(mark, 6, 0) == b"builds":
                tell()
            fcntl.flock(mark, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _open_files() -> dict[str, int]:
    """Path of each open file to a process that has it, as far as they can be seen."""
    holders: dict[str, int] = {}
    for entry in Path("/proc").glob("[0-9]*/fd"):
        try:
            for link in entry.iterdir():
                holders.setdefault(str(link.readlink()), int(entry.parent.name))
        except OSError:
            continue
    return holders


def _compilers() -> list[str | None]:
    """Where each compiler that runs on this machine works; None where that cannot be seen."""
    found: list[str | None] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text().strip() in ("ninja", "cc1plus", "nvcc", "cicc", "ptxas"):
                found.append(str((process / "cwd").readlink()))
        except PermissionError:
            found.append(None)
        except OSError:  # it has ended
            continue
    return found


def mount_of(path: Path) -> dict[str, str]:
    """The file system that holds `path`, as /proc/self/mounts names it."""
    best = ("", "?")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        if (path.resolve() == Path(point) or Path(point) in path.resolve().parents) and len(point) >= len(best[0]):
            best = (point, kind)
    return {"mount": best[0], "filesystem": best[1]}
