"""One save on its way to the disk, behind training: files, agreement of the ranks, publishing, reading back.

The training thread hands over what is to be written; everything after that runs here, in a thread of each rank, with
collectives on a process group of its own. Every rank comes to the same outcome.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.checkpoint import commit
from training.checkpoint.manifest import Written, file_sha256, newest
from training.checkpoint.outcome import Saved, SaveFailed, on_main
from training.checkpoint.retention import Retention

if TYPE_CHECKING:
    from training.checkpoint.store.remote import Remote
    from training.checkpoint.writer import Files
    from training.distributed import World


@dataclass(frozen=True)
class Order:
    """What is to become of the files of one save."""

    final: Path
    partial: Path
    step: int
    tokens: int
    manifest: dict[str, Any]
    """All of it but `files`."""
    retention: Retention
    verify: bool
    private: bool
    """The folder is for this user alone."""
    remote: Remote | None
    """Where the checkpoint goes as well."""
    started: float
    """time.perf_counter() at the call."""


class Save:
    """Runs an order to its end in a daemon thread: a process that must die is not held by it."""

    def __init__(self, order: Order, files: Files, world: World, reached: Callable[[str], None]) -> None:
        """world: with a process group that nothing else uses meanwhile. reached: told each phase on each rank."""
        self.stall_seconds = 0.0
        """For which it held the training thread so far."""
        self._order, self._files, self._world, self._reached = order, files, world, reached
        self._outcome: Saved | BaseException | None = None
        self._published = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"save of step {order.step}", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether `outcome` would answer at once on this rank."""
        return not self._thread.is_alive()

    def wait_until_published(self) -> None:
        """Return when the checkpoint can be seen, or never will be."""
        self._published.wait()

    def outcome(self) -> Saved | SaveFailed:
        """Wait for the end. Raises what is not a failure of a disk."""
        asked = time.perf_counter()
        self._thread.join()
        self.stall_seconds += time.perf_counter() - asked
        if isinstance(self._outcome, Saved):
            return replace(self._outcome, stall_seconds=self.stall_seconds)
        assert self._outcome is not None
        if isinstance(self._outcome, SaveFailed):
            return self._outcome
        raise self._outcome

    def _run(self) -> None:
        try:
            self._outcome = self._save()
        except SaveFailed as failure:
            if self._world.is_main:
                shutil.rmtree(self._order.partial, ignore_errors=True)
            self._outcome = failure
        except BaseException as error:  # told where it is waited for
            self._outcome = error
        finally:
            self._published.set()

    def _save(self) -> Saved:
        order = self._order
        self._files.write_all()
        self._reached("written")
        written = self._agree_on_files()
        size = on_main(self._world, lambda: self._publish(written), order.final)
        self._published.set()
        if order.verify:
            self._read_back(written)
        if order.remote is not None:
            order.remote.upload(self._world, order.final, order.step, written)
        return Saved(
            path=order.final,
            url=order.remote.where(order.step) if order.remote is not None else None,
            step=order.step,
            tokens=order.tokens,
            seconds=time.perf_counter() - order.started,
            stall_seconds=0.0,
            bytes=size,
            verified=order.verify or order.remote is not None,
        )

    def _agree_on_files(self) -> dict[str, Written]:
        everyone = self._world.gather_objects((self._files.written, self._files.error))
        for _, error in everyone:
            if error is not None:
                raise SaveFailed(f"checkpoint {self._order.final} was not saved: {error}")
        return {name: file for written, _ in everyone for name, file in sorted(written.items())}

    def _publish(self, files: dict[str, Written]) -> int:
        order = self._order
        commit.take_in(order.partial, files)
        if order.private:
            order.partial.chmod(0o700)
        manifest = {**order.manifest, "files": {name: file.as_plain() for name, file in files.items()}}
        size = commit.seal_folder(order.partial, manifest, self._reached)
        commit.publish(order.partial, order.final, self._reached)
        for old in order.retention.to_delete(order.final.parent, order.final):
            commit.drop(old, self._reached)
        self._reached("done")
        return size + sum(file.bytes for file in files.values())

    def _read_back(self, files: dict[str, Written]) -> None:
        """Hash what this rank wrote once more, from the disk. One that differs is set aside and never chosen."""
        mine = {name: file.sha256 for name, file in files.items() if file.rank == self._world.rank}
        found = next((text for text in self._world.gather_objects(_difference(self._order.final, mine)) if text), None)
        if found is not None:
            on_main(self._world, lambda: _condemn(self._order.final), self._order.final)
            raise SaveFailed(f"checkpoint {self._order.final} is not what was written and is set aside: {found}")


def _difference(path: Path, files: dict[str, str]) -> str | None:
    for name, expected in files.items():
        try:
            found = file_sha256(path / name)
        except OSError as error:
            return f"{name} cannot be read back: {error.strerror or error}"
        if found != expected:
            return f"{name} was written with SHA-256 {expected[:12]}... and reads {found[:12]}..."
    return None


def _condemn(path: Path) -> None:
    commit.set_aside(path)
    previous = newest(path.parent)
    if previous is not None:
        commit.name_latest(previous)
