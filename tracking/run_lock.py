"""Ensure that only one job at a time writes a run folder, with a lock file that names its holder.

The lock is an flock, which the kernel releases when the process ends. Not every shared file system propagates flocks to
other machines, so the holder also touches the file regularly: a lock of another machine that is no longer touched
belongs to a job that is gone.
"""

import json
import os
import socket
import threading
import time
from calendar import timegm
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from config.errors import UserError
from config.machine import processes
from config.machine.processes import machine, pid_namespace, runs, start_ticks
from config.printable import tell
from tracking.run_dir import RunDir

LOCK = ".run_lock"
_SINCE = "%Y-%m-%d %H:%M:%S UTC"
BEAT_SECONDS = 10.0
"""Interval at which the holder touches the file."""
SILENT_SECONDS = 60.0
"""Seconds without a touch after which the holder on another machine counts as gone. A new job waits three times as long
before it is refused, since ranks that are cut off from the others keep writing for up to 80 s."""
ENDING_SECONDS = 10.0
"""Seconds that a starting job waits for the holder, which may already be shutting down."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a run folder's lock, as far as this machine can tell."""

    words: str
    """Process and machine, such as "pid 312 on node-7"."""
    alive: bool
    """Whether it is running; on another machine or in another container, whether it touched the lock recently."""
    since: float | None
    """[seconds since the epoch] Time at which it acquired the lock."""


def holder(folder: Path) -> Holder | None:
    """The process that is writing the folder, from its lock file, which is only read; None if no holder is recorded."""
    owner, touched = _read(folder / LOCK)
    pid, started, since = owner.get("pid"), owner.get("started"), None
    if not isinstance(pid, int) or not isinstance(started, int):
        return None
    with suppress(TypeError, ValueError):
        since = float(timegm(time.strptime(owner.get("since", ""), _SINCE)))
    alive = runs(pid, started) if _is_of_here(owner) else time.time() - touched / 1e9 < SILENT_SECONDS
    return Holder(f"pid {pid} on {owner.get('host')}", alive, since)


class RunLock:
    """The lock of one run folder, held until `release` or until this process ends."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path, self._handle = path, handle
        self._over = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    @classmethod
    def take(cls, folder: Path) -> Self | None:
        """Lock the folder; None if no file can be created in it. Raises UserError if another job is writing it."""
        path, ends, told = folder / LOCK, time.monotonic() + ENDING_SECONDS, False
        while True:
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError:
                return None
            owner = _owner(handle)
            elsewhere = bool(owner) and owner.get("machine") != machine() and not processes.is_local(path)
            if not elsewhere and _locked(handle, owner) and _is_at(path, handle):
                _write(handle)
                return cls(path, handle)
            try:
                if elsewhere:  # that machine may have died without unlocking: only touches show that it lives
                    _wait_for_silence(folder, owner)
                    if _is_at(path, handle):
                        path.unlink()
                    continue
            finally:
                os.close(handle)
            if time.monotonic() > ends:
                raise UserError(
                    f"{folder}: {_words(owner)} is still writing this run; stop it or choose another run.name"
                )
            if not told:
                told = True
                tell(f"waiting for {_words(owner)}, which is still writing {folder}")
            time.sleep(0.2)

    def is_of(self, folder: Path) -> bool:
        """Whether this folder is the locked one, rather than one that has since been renamed."""
        return _is_at(folder / LOCK, self._handle)

    def release(self) -> None:
        if not self._over.is_set():
            self._over.set()
            with suppress(OSError):
                os.ftruncate(self._handle, 0)
            os.close(self._handle)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._handle)


@contextmanager
def created_and_locked(root: Path, name: str, *, fresh: bool) -> Iterator[RunDir]:
    """Context manager: `RunDir.create`, with the folder locked. A folder that another job is writing is never renamed.

    Raises UserError if it cannot be made, or if another job is writing it.
    """
    with ExitStack() as ends:
        lock = RunLock.take(root / name)
        if lock is not None:
            ends.callback(lock.release)
        run_dir = RunDir.create(root, name, fresh=fresh)
        if lock is None or not lock.is_of(run_dir.path):  # it is new, or replaces one that was renamed
            new = RunLock.take(run_dir.path)
            if new is not None:
                ends.callback(new.release)
        yield run_dir


def _locked(handle: int, owner: dict[str, Any]) -> bool:
    """Acquire the flock; False if it is held. Without file-system locks: whether its owner does not run here."""
    from filelock import lock_descriptor  # imported late so that read-only tools start quickly

    try:
        return lock_descriptor(handle, blocking=False)
    except OSError:
        return not (_is_of_here(owner) and runs(owner["pid"], owner["started"]))


def _is_of_here(owner: dict[str, Any]) -> bool:
    """Whether the owner's process would be visible from here: same machine and PID namespace."""
    return (owner.get("machine"), owner.get("pid_namespace")) == (machine(), pid_namespace())


def _wait_for_silence(folder: Path, owner: dict[str, Any]) -> None:
    """Return once a holder on another machine has stopped touching its lock. Raises UserError if it does not stop."""
    path, seconds = folder / LOCK, f"{SILENT_SECONDS:.0f} s"
    tell(f"{_words(owner)} left {path}; it is passed over when that machine has not touched it for {seconds}")
    since = time.monotonic()
    ends, (_, touched) = since + 3 * SILENT_SECONDS, _read(path)
    while time.monotonic() - since < SILENT_SECONDS:
        if time.monotonic() > ends:
            advice = f"stop it, choose another run.name, or remove {path} if no job writes there"
            raise UserError(f"{folder}: {_words(owner)} is still writing this run; {advice}")
        time.sleep(min(1.0, SILENT_SECONDS / 10))
        before, (_, touched) = touched, _read(path)
        if touched != before:
            since = time.monotonic()


def _read(path: Path) -> tuple[dict[str, Any], int]:
    """(owner of a lock, time of its last touch [ns]); empty and 0 without a file.

    The time is read through an open file: a network file system may return a stale one otherwise.
    """
    try:
        with path.open("rb") as file:
            return _owner(file.fileno()), os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return {}, 0


def _owner(handle: int) -> dict[str, Any]:
    """Owner recorded in the lock; empty if there is none or it cannot be read."""
    try:
        found = json.loads(os.pread(handle, 4096, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except OSError:
        return False


def _write(handle: int) -> None:
    owner = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime(_SINCE, time.gmtime()),
        "started": start_ticks(os.getpid()),
        "machine": machine(),
        "pid_namespace": pid_namespace(),
    }
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(owner).encode() + b"\n", 0)
    os.fsync(handle)


def _words(owner: dict[str, Any]) -> str:
    if not owner:
        return "another job"
    return f"a job (pid {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')})"
