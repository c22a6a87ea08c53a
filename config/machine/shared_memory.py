"""What killed processes left in /dev/shm, which nobody else removes before the machine restarts. Standard library only.

Python's process pools keep named semaphores there, which a helper process of theirs removes, unless it is killed with
them, as by SIGKILL to a whole session. DeepSpeed 0.19.8 never removes its own memory.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from config.machine.processes import pid_namespace, read, runs, start_ticks

FOLDER = Path("/dev/shm")
YOUNG_SECONDS = 600.0
"""A segment this young may be of a job that is just starting, in another container."""


@contextmanager
def own_semaphores() -> Iterator[None]:
    """Name the semaphores of the pools that the body makes after this process, and remove those of dead processes."""
    config: Any = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = config.get("semprefix")
    config["semprefix"] = f"/mantissa-{_namespace()}-{os.getpid()}-{start_ticks(os.getpid())}"
    remove_left_semaphores()
    try:
        yield
    finally:
        config["semprefix"] = before


def remove_left_semaphores() -> None:
    """Remove the semaphores of processes that have ended. Those of another container cannot be judged, and stay."""
    for path in FOLDER.glob(f"sem.mantissa-{_namespace()}-*"):
        found = re.match(r"sem\.mantissa-\d+-(\d+)-(\d+)-", path.name)
        if found and not runs(int(found[1]), int(found[2])):
            with suppress(OSError):
                path.unlink()


def remove_left_segments() -> None:
    """Remove DeepSpeed's segments that no visible process of this user has mapped, and that are not young.

    Only ranks that start need the name: should one that is mapped in another container lose it, nothing is lost.
    """
    named = [path for path in FOLDER.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*") if _age(path) > YOUNG_SECONDS]
    if not named:
        return
    mapped = "".join(read(str(path)) for path in Path("/proc").glob("[0-9]*/maps"))
    for path in named:
        if str(path) not in mapped:
            with suppress(OSError):
                path.unlink()


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _namespace() -> str:
    return re.sub(r"\D", "", pid_namespace()) or "0"
