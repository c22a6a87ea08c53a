"""Where DeepSpeed's ops are built, one at a time, and the locks of builds that were killed. The standard library only.

torch builds an op under a lock file, and waits for an existing one for ever and silently. A building process keeps the
file open (`torch.utils.file_baton`), so a lock that no process has open was left by a killed build; but processes of
other containers and machines cannot be seen. So a build started here also holds an flock, which ends with the process,
on a marker file: a marker that says "builds" and is not locked belongs to a killed build.
"""

import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from config.machine import processes

YOUNG_SECONDS = 900.0
"""A build that changed a file this recently may be that of a process that cannot be seen, in another container and
without a marker. A file of DeepSpeed's takes six minutes to compile on a busy machine."""


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
    hidden = bool(found) and None in _compilers()
    facts = []
    for real, path in found.items():
        try:
            age = time.time() - path.stat().st_mtime
        except OSError:  # its build has just ended
            continue
        unsure = hidden or not processes.is_local(path)
        facts.append({"path": str(path), "pid": holders.get(real), "age": age, "unsure": unsure})
    return facts


@contextmanager
def exclusive_build(op: str, log: Callable[[str], None]) -> Iterator[None]:
    """Inside, no other process of Mantissa on this machine builds or loads `op`, and abandoned locks are removed.

    A lock of a build without a marker, whose files changed within YOUNG_SECONDS, is waited for until they are older.
    `log` gets one line on what is waited for or was removed.
    """
    with _marker(op, log) as marker:
        killed = marker is not None and bool(os.pread(marker, 1, 0))
        clear_abandoned(op, log, young_seconds=0.0 if killed else YOUNG_SECONDS)
        built = any(extensions_folder().glob(f"**/{op}.so"))
        if marker is not None:
            os.pwrite(marker, b"loads\n" if built else b"builds\n", 0)
        try:
            yield
        finally:
            if marker is not None:
                os.ftruncate(marker, 0)


def clear_abandoned(op: str, log: Callable[[str], None], young_seconds: float = YOUNG_SECONDS) -> None:
    """Remove locks that killed builds of `op` left. Returns when the remaining ones may belong to running builds."""
    logged = set()

    def log_once(line: str) -> None:
        if line not in logged:
            log(line)
        logged.add(line)

    folder = extensions_folder()
    while not all(_settled(lock, log_once, young_seconds) for lock in locks(folder, op)):
        time.sleep(0.5)


def _settled(lock: dict[str, Any], log: Callable[[str], None], young_seconds: float) -> bool:
    """Whether a lock needs no more attention: it may belong to a running build, or it was removed."""
    path = Path(lock["path"])
    op = path.parent.name
    if lock["pid"] is not None:
        log(f"waiting for {path}: process {lock['pid']} builds {op}")
        return True
    if lock["unsure"]:
        log(f"waiting for {path}: another process builds {op}; if none does, on any machine, remove that file")
        return True
    if str(path.parent.resolve()) in _compilers():
        log(f"waiting for what a killed build left running in {path.parent}")
        return False
    try:
        before = path.stat()
        age = time.time() - max(file.stat().st_mtime for file in path.parent.iterdir())
    except OSError:  # files of a running build
        return False
    if age < young_seconds:
        when = f"it is removed when its build is {young_seconds:.0f} s old"
        log(f"waiting for {path}: no process here holds it; {when}; if no container builds {op}, remove it")
        return False
    try:
        if path.stat().st_ino != before.st_ino:
            return False
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        log(f"waiting for {path}, which a killed build left: {error.strerror}; remove it")
    else:
        log(f"removed {path}: the build of {op} that left it was killed")
    return True


@contextmanager
def _marker(op: str, log: Callable[[str], None]) -> Iterator[int | None]:
    """A locked file that says whether `op` is being built; None where it cannot be created or locked."""
    folder = extensions_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker = os.open(folder / f".{op}.mantissa", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        yield None
        return
    try:
        yield marker if _acquire(marker, lambda: log(f"waiting for another process, which builds {op}")) else None
    finally:
        os.close(marker)


def _acquire(marker: int, log: Callable[[], None]) -> bool:
    """Lock the file, after other holders; False on a file system without locks."""
    try:
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if os.pread(marker, 6, 0) == b"builds":
                log()
            fcntl.flock(marker, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


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


def _compilers() -> list[str | None]:
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
