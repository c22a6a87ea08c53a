"""What came of a save, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.distributed import World


class SaveFailed(OSError):
    """A checkpoint could not be written; every rank comes to the same. One line: the rank, the file and the reason."""


@dataclass(frozen=True)
class Saved:
    """What a save did."""

    path: Path
    url: str | None
    """Of the same in the object store, where there is one."""
    step: int
    tokens: int
    seconds: float
    """From the call to the published and, where that is asked for, read back and uploaded checkpoint."""
    stall_seconds: float
    """For which the training thread was held: copying to host memory, and waiting for the end where it had to."""
    bytes: int
    verified: bool
    """Every file was read back, from the disk or from the store, and has the hash of what was written."""


def on_main(world: World, act: Callable[[], Any], path: Path | str) -> Any:
    """What `act` gives on the main process, on every rank; raises SaveFailed on all when it meets an OSError."""
    value, error = None, None
    if world.is_main:
        try:
            value = act()
        except OSError as problem:
            error = f"checkpoint {path} was not saved: {problem}"
    value, error = world.from_main((value, error))
    if error is not None:
        raise SaveFailed(error)
    return value
