"""A lock file that one process at a time holds; the kernel releases it with its process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive_lock(path: Path, wait_s: float) -> Iterator[bool]:
    """Hold the lock file `path`; yields whether it was acquired within `wait_s` seconds (negative: waits for ever).

    On a file system without locks everybody acquires it. Raises OSError where the file cannot be made.
    """
    from filelock import FileLock, Timeout  # what only reads runs has to start in no time

    path.open("ab").close()
    lock = FileLock(path, timeout=wait_s, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    except OSError:
        yield True
        return
    try:
        yield True
    finally:
        lock.release()
