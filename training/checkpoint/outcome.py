"""The outcome of a save, the same on every rank."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.errors import UserError
from training.distributed import World


class SaveFailed(OSError):
    """A checkpoint could not be written; the same on every rank. One line: the rank, the file and the reason."""


class NotFinite(SaveFailed):
    """A checkpoint was not written because its masters or moments are not finite."""


class NotUploaded(SaveFailed):
    """A checkpoint is in the run folder, but not in the object store, to which the next start uploads it."""


@dataclass(frozen=True)
class Saved:
    path: Path
    url: str | None
    """The URL in the object store, if there is one."""
    step: int
    tokens: int
    seconds: float
    """[s] From the call until it was published and, if configured, read back and uploaded."""
    stall_seconds: float
    """[s] How long the training thread was blocked: copying to host memory, and any wait for the end."""
    bytes: int
    verified: bool
    """Whether every file was read back, from the disk or the store, with the written hash."""


def on_main(world: World, act: Callable[[], Any], path: Path | str) -> Any:
    """Return rank 0's result of `act` on every rank; raises SaveFailed on all if it raises OSError or UserError."""
    try:
        return world.on_main(act, catch=(OSError, UserError))
    except UserError as problem:
        raise SaveFailed(f"checkpoint {path} was not saved: {problem}") from None
