"""A lock file held by one process at a time; the kernel releases it when the process ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive_lock(path: Path, wait_s: float) -> Iterator[bool]:
    """Hold the lock file `path`; yields whether it was acquired within `wait_s` seconds (negative: no limit).

    On a file system without locks every process acquires it. Raises OSError if the file cannot be created.
    """
    from filelock import FileLock, Timeout  # imported late so that read-only tools start quickly

    path.open("ab").close()
    lock = FileLock(path, timeout=wait_s, fallback_to_soft=False)
    try:
        lock.acquire()
        acquired = True
    except OSError as error:
        acquired = not isinstance(error, Timeout)
    try:
        yield acquired
    finally:
        lock.release()
