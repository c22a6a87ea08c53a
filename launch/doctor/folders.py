"""What one machine says about its folders: space and speed. The standard library only."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from config.machine.op_builds import mount_of

SPEED_BYTES = 64 * 2**20
"""Size of the file that is written and read back to see how fast a folder is."""


def examine_folders(paths: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Role to facts of its folder; the speed of a disk that holds several is measured once."""
    seen: set[str] = set()
    return {role: examine_folder(path, seen) for role, path in paths.items()}


def examine_folder(name: str, measured: set[str]) -> dict[str, Any]:
    """Space, kind of file system, and the speed of a file that is written, flushed and read back from the disk.

    measured: mount points whose speed is known; this one's is added.
    """
    path = there(name)
    facts: dict[str, Any] = {"path": name, "error": None}
    probe = path / f".doctor-{os.getpid()}-{socket.gethostname()}"
    try:
        of = os.statvfs(path)
        free = of.f_frsize * of.f_bavail
        facts.update(free=free, free_files=of.f_favail if of.f_files else None, **mount_of(path))
        facts["noexec"] = bool(of.f_flag & os.ST_NOEXEC)
        facts.update(_speed(probe, 0 if facts["mount"] in measured else min(SPEED_BYTES, free // 4)))
        measured.add(facts["mount"])
    except OSError as error:
        facts["error"] = error.strerror or str(error)
    finally:
        with suppress(OSError):
            probe.unlink()
    return facts


def _speed(probe: Path, size: int) -> dict[str, float | None]:
    """Bytes a second of writing with fsync, and of reading what the page cache was told to forget."""
    block = os.urandom(2**20)
    with probe.open("wb", buffering=0) as file:
        began = time.perf_counter()
        for _ in range(size // len(block)):
            file.write(block)
        file.write(b"end")
        os.fsync(file.fileno())
        wrote = time.perf_counter() - began
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    probe.read_bytes()
    read = time.perf_counter() - began
    enough = size >= 8 * len(block)
    return {"write": size / wrote if enough else None, "read": size / read if enough else None}


def there(path: str) -> Path:
    """The folder, or the nearest one above it that there is: looking must not make folders."""
    folder = Path(path).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
