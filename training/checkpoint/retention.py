"""Retention of checkpoints: the newest, those at an interval, the best by validation loss, and those being read."""

import fcntl
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.checkpoint.choice import by_step, step_of
from training.checkpoint.manifest import MANIFEST, Unusable, read_manifest


@dataclass(frozen=True)
class Retention:
    """A checkpoint is kept when any of these rules selects it."""

    newest: int
    """The number of highest steps to keep."""
    every: int = 0
    """[steps] Checkpoints whose step is a multiple of this are kept; 0: none."""
    best: int = 0
    """The number of steps to keep with the lowest validation loss, among those evaluated at their step."""

    def to_delete(self, folder: Path, final: Path) -> list[Path]:
        """Checkpoints in `folder` to delete, among those up to `final`, the one just published."""
        paths = {step_of(path): path for path in by_step(folder)}
        expired = self.expired(list(paths), step_of(final), lambda step: validation_loss(paths[step]))
        return [paths[step] for step in expired]

    def expired(self, steps: Sequence[int], final: int, loss_of: Callable[[int], float | None]) -> list[int]:
        """Steps to delete among `steps` up to `final`; later ones, from before a rollback, are replaced when the run
        reaches them again. loss_of: called only if `best` is set."""
        steps_until = sorted((step for step in steps if step <= final), reverse=True)
        kept = {final, *steps_until[: self.newest]}
        if self.every:
            kept |= {step for step in steps_until if step % self.every == 0}
        if self.best:
            losses = {step: loss for step in steps_until if (loss := loss_of(step)) is not None}
            kept |= set(sorted(losses, key=lambda step: (losses[step], step))[: self.best])
        return [step for step in steps_until if step not in kept]


def validation_loss(path: Path) -> float | None:
    """Nats per label token at the checkpoint's step; None when it was not evaluated, not finite or not readable."""
    try:
        return loss_in(read_manifest(path))
    except (Unusable, OSError):
        return None


def loss_in(manifest: dict[str, Any]) -> float | None:
    """The finite validation loss in a manifest, or None."""
    loss = manifest.get("validation_loss")
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


@contextmanager
def read_lock(path: Path) -> Iterator[None]:
    """Context in which `path` is not deleted, if the file system has locks: holds a shared one on its manifest."""
    with ExitStack() as held:
        with suppress(OSError):
            file = held.enter_context((path / MANIFEST).open("rb"))
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def is_read_locked(path: Path) -> bool:
    """Whether any process holds a `read_lock` of the checkpoint."""
    try:
        with (path / MANIFEST).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
