"""One save in the background: write the files, agree with the other ranks, publish, read back, upload."""

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from training.checkpoint import commit
from training.checkpoint.choice import newest
from training.checkpoint.manifest import Tensors, Written, check_hashes, problem_of
from training.checkpoint.outcome import NotFinite, Saved, SaveFailed, on_main
from training.checkpoint.retention import Retention
from training.checkpoint.store.remote import Remote
from training.checkpoint.writer import Files
from training.distributed import World


class Save:
    """A save that runs in a daemon thread, which does not keep a dying process alive."""

    def __init__(
        self,
        final: Path,
        files: Files,
        world: World,
        reached: Callable[[str], None],
        *,
        manifest: dict[str, Any],
        retention: Retention,
        verify: bool,
        remote: Remote | None,
        started: float,
    ) -> None:
        """world: with a process group of its own. reached: called with each phase. manifest: without `files`. started:
        time.perf_counter() at the call."""
        self.stall_seconds = 0.0
        """[s] How long the save has blocked the training thread so far."""
        self.published = threading.Event()
        """Set when the checkpoint is published, or the save failed."""
        self._final, self._files, self._world, self._reached = final, files, world, reached
        self._manifest, self._retention, self._started = manifest, retention, started
        self._verify, self._remote = verify, remote
        self._partial = commit.partial_of(final)
        self._outcome: Saved | BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"save of {final.name}", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether `outcome` would return at once on this rank."""
        return not self._thread.is_alive()

    def outcome(self) -> Saved | SaveFailed:
        """Wait for the end and return the outcome. Raises any error other than SaveFailed."""
        started = time.perf_counter()
        self._thread.join()
        self.stall_seconds += time.perf_counter() - started
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
                shutil.rmtree(self._partial, ignore_errors=True)
            self._outcome = failure
        except BaseException as error:  # raised by `outcome`
            self._outcome = error
        finally:
            self.published.set()

    def _save(self) -> Saved:
        final, remote, step = self._final, self._remote, int(self._manifest["step"])
        self._files.write_all()
        self._reached("written")
        written, layouts = agree_on_files(self._world, self._files, final)
        size = on_main(self._world, lambda: self._publish(written, layouts), final)
        self.published.set()
        if self._verify:
            self._read_back(written)
        on_main(self._world, self._prune, final)
        if remote is not None:
            remote.upload(self._world, final, step, written)
        return Saved(
            path=final,
            url=remote.url_of(step) if remote is not None else None,
            step=step,
            tokens=self._manifest["data"]["tokens"],
            seconds=time.perf_counter() - self._started,
            stall_seconds=0.0,
            bytes=size,
            verified=self._verify or remote is not None,
        )

    def _publish(self, files: dict[str, Written], layouts: dict[str, Tensors]) -> int:
        commit.add_unlisted_files(self._partial, files)
        if self._manifest["encryption"] is not None:  # only this user may read the folder
            self._partial.chmod(0o700)
        listed = {name: asdict(file) for name, file in files.items()}
        manifest = {**self._manifest, "layouts": layouts, "files": listed}
        size = commit.seal_folder(self._partial, manifest, self._reached)
        commit.publish(self._partial, self._final, self._reached)
        return size + sum(file.bytes for file in files.values())

    def _prune(self) -> None:
        for old in self._retention.to_delete(self._final.parent, self._final):
            commit.drop(old, self._reached)
        self._reached("done")

    def _read_back(self, files: dict[str, Written]) -> None:
        """Hash this rank's files again, from the disk. If any differs, the checkpoint is renamed and never chosen."""
        final = self._final
        mine = {name: asdict(file) for name, file in files.items() if file.rank == self._world.rank}
        problem = problem_of(lambda: check_hashes(final, {"files": mine}, mine), final)
        problem = next(filter(None, self._world.gather_objects(problem)), None)
        if problem is not None:
            on_main(self._world, self._rename_damaged, final)
            raise SaveFailed(f"checkpoint {final} differs from what was written and is set aside: {problem}")

    def _rename_damaged(self) -> None:
        commit.rename_damaged(self._final)
        if (previous := newest(self._final.parent)) is not None:
            commit.name_latest(previous)


def agree_on_files(world: World, files: Files, final: Path) -> tuple[dict[str, Written], dict[str, Tensors]]:
    """The files and layouts of all ranks on rank 0, to which the first rank sends a layout that it lacks; elsewhere
    this rank's. A collective. Raises SaveFailed on every rank if any could not write, NotFinite if its state is not
    finite."""
    layouts = files.layouts
    everyone = world.to_main((files.written, files.error, files.finite))

    def settled() -> tuple[str | None, bool, dict[str, int]]:
        """The problem or None, whether all is finite, and for each layout that rank 0 lacks the first rank with it."""
        problem, finite = next(((error, fine) for _, error, fine in everyone if error is not None), (None, True))
        listed = [file for written, *_ in reversed(everyone) for file in written.values() if file.layout]
        return problem, finite, {file.layout: file.rank for file in listed if file.layout not in layouts}

    problem, finite, unknown = on_main(world, settled, final)
    if problem is not None:
        raise (SaveFailed if finite else NotFinite)(f"checkpoint {final} was not saved: {problem}")
    for layout, rank in unknown.items():
        layouts[layout] = world.main_receives(layouts.get(layout, {}), rank)
    return {name: file for written, *_ in everyone for name, file in sorted(written.items())} or files.written, layouts
