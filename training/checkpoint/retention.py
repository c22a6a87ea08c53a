"""Retention of checkpoints: the newest, those at an interval, the best by validation loss, and those being read."""

import fcntl
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.checkpoint.choice import by_step, manifest_in, step_of
from training.checkpoint.manifest import MANIFEST
from training.checkpoint.run_record import Record, order_in, read_record


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
        expired = self.expired(paths, step_of(final), lambda step: manifest_in(paths[step]), read_record(folder))
        return [paths[step] for step in expired]

    def expired(
        self,
        steps: Iterable[int],
        final: int,
        manifest_of: Callable[[int], dict[str, Any] | None],
        record: Record | None,
    ) -> list[int]:
        """Steps to delete among `steps` up to `final`, those that the run abandoned when it went back among them; later
        ones are replaced when the run reaches them again. manifest_of: None where it cannot be read; called only if it
        is needed. record: from RUN."""
        until = sorted((step for step in steps if step <= final), reverse=True)
        needed = self.best or (record and record.went_back)
        found = {step: manifest for step in until if needed and (manifest := manifest_of(step)) is not None}
        abandoned = {step for step, manifest in found.items() if record and record.left(order_in(manifest))}
        own = [step for step in until if step not in abandoned]
        kept = {final, *own[: self.newest]}
        if self.every:
            kept |= {step for step in own if step % self.every == 0}
        if self.best:
            losses = {step: loss for step in own if (loss := loss_in(found.get(step, {}))) is not None}
            kept |= set(sorted(losses, key=lambda step: (losses[step], step))[: self.best])
        return [step for step in until if step not in kept]


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
    try:
        with (path / MANIFEST).open("r+b") as file:  # NFS gives exclusive locks only to files open for writing
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
