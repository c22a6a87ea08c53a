"""The folder where DeepSpeed's ops are built, one at a time, and locks left by killed builds.

torch builds an op under a lock file, and silently waits forever for an existing one. A building process keeps the file
open (`torch.utils.file_baton`), so a lock that no process has open was left by a killed build; but processes of other
machines and users cannot be seen.
"""

import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from config.machine import processes


def extensions_folder() -> Path:
    """The folder for this environment's ops: TORCH_EXTENSIONS_DIR, else its own folder in torch's cache.

    Two environments sharing a folder would rebuild each other's ops at every start, a minute each time: the compiler's
    command line and the libraries that an op is linked with differ between environments.
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
    """Have torch build and find ops in `extensions_folder`, in this process and its children."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions_folder())


def locks(folder: Path, op: str = "*") -> list[dict[str, Any]]:
    """Locks of builds of `op`: path, pid of the holder or None, age in seconds, and whether the pid is `unsure`."""
    found = {str(path.resolve()): path for path in folder.glob(f"**/{op}/lock")}
    holders = _open_files() if found else {}
    facts = []
    for real, path in found.items():
        with suppress(OSError):  # its build has just ended
            state = path.stat()
            unsure = state.st_uid != os.getuid() or not processes.is_local(path)
            age = time.time() - state.st_mtime
            facts.append({"path": str(path), "pid": holders.get(real), "age": age, "unsure": unsure})
    return facts


@contextmanager
def exclusive_build(op: str, log: Callable[[str], None]) -> Iterator[None]:
    """Context manager: no other Mantissa process here builds or loads `op`, and abandoned locks are removed."""
    folder = extensions_folder()
    with ExitStack() as held:
        with suppress(OSError):  # a folder that may not be written, or a file system without locks
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((folder / f".{op}.mantissa").open("w", encoding="utf-8"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not any(folder.glob(f"**/{op}.so")):
                    log(f"waiting for another process, which builds {op}")
                fcntl.flock(lock, fcntl.LOCK_EX)
        clear_abandoned(op, log)
        yield


def clear_abandoned(op: str, log: Callable[[str], None]) -> None:
    """Remove locks left by killed builds of `op`. Those that remain may belong to running builds."""
    for lock in locks(extensions_folder(), op):
        path = Path(lock["path"])
        built = path.parent.name
        if lock["pid"] is not None:
            log(f"waiting for {path}: process {lock['pid']} builds {built}")
        elif lock["unsure"]:
            log(f"waiting for {path}: another process builds {built}; if none does, on any machine, remove that file")
        else:
            try:
                path.unlink(missing_ok=True)
                log(f"removed {path}: the build of {built} that left it was killed")
            except OSError as error:
                log(f"waiting for {path}, which a killed build left: {error.strerror}; remove it")


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
