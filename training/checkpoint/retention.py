"""Which checkpoints stay: the newest ones, every so many steps, the best by validation loss, and what is being read."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.checkpoint.manifest import MANIFEST, Unusable, by_step, read_manifest


@dataclass(frozen=True)
class Retention:
    """A checkpoint stays when any of these says so."""

    newest: int
    """So many of the highest step."""
    every: int = 0
    """[steps] Those whose step is a multiple of it; 0: none."""
    best: int = 0
    """So many of the lowest validation loss, of those that were evaluated at their very step."""

    def to_delete(self, folder: Path, final: Path) -> list[Path]:
        """Of the checkpoints in `folder` up to `final`, the one just published, those that need not stay."""
        paths = {step_of(path): path for path in by_step(folder)}
        gone = self.expired(list(paths), step_of(final), lambda step: validation_loss(paths[step]))
        return [paths[step] for step in gone]

    def expired(self, steps: Sequence[int], final: int, loss_of: Callable[[int], float | None]) -> list[int]:
        """Of `steps` up to `final` those that need not stay. loss_of: asked only where the best ones stay.

        Later ones are of a past that the run went back behind; they are replaced when it comes there.
        """
        upto = sorted((step for step in steps if step <= final), reverse=True)
        stay = {final, *upto[: self.newest]}
        if self.every:
            stay |= {step for step in upto if step % self.every == 0}
        if self.best:
            losses = {step: loss for step in upto if (loss := loss_of(step)) is not None}
            stay |= set(sorted(losses, key=lambda step: (losses[step], step))[: self.best])
        return [step for step in upto if step not in stay]


def step_of(path: Path) -> int:
    """The step in the name of a published checkpoint."""
    return int(path.name[5:])


def validation_loss(path: Path) -> float | None:
    """Nats per label token at the checkpoint's step; None when it was not evaluated, not finite or not readable."""
    try:
        return loss_in(read_manifest(path))
    except (Unusable, OSError):
        return None


def loss_in(manifest: dict[str, Any]) -> float | None:
    """The same of a manifest."""
    loss = manifest.get("validation_loss")
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


@contextmanager
def read_lock(path: Path) -> Iterator[None]:
    """Whoever retains or prunes checkpoints meanwhile, in this process or another one, leaves `path` alone.

    A shared lock on its manifest. Where the file system has no locks it does nothing.
    """
    handle = None
    with suppress(OSError):
        handle = os.open(path / MANIFEST, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def is_read_locked(path: Path) -> bool:
    """Whether someone is inside `read_lock` of the checkpoint."""
    try:
        handle = os.open(path / MANIFEST, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False
