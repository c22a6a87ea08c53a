"""One save in the background: write the files, agree with the other ranks, publish, read back, upload."""

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
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


@dataclass(eq=False, kw_only=True)
class Save:
    """A save that runs in a daemon thread, which does not keep a dying process alive."""

    final: Path
    files: Files
    world: World
    """With a process group of its own."""
    reached: Callable[[str], None]
    """Called with each phase."""
    manifest: dict[str, Any]
    """Without `files`."""
    retention: Retention
    verify: bool
    remote: Remote | None
    started: float
    """time.perf_counter() at the call."""
    stall_seconds: float = 0.0
    """[s] How long the save has blocked the training thread so far."""
    published: threading.Event = field(default_factory=threading.Event)
    """Set when the checkpoint is published, or the save failed."""
    _saved: Future[Saved] = field(default_factory=Future)

    def __post_init__(self) -> None:
        threading.Thread(target=self._run, name=f"save of {self.final.name}", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether `outcome` would return at once on this rank."""
        return self._saved.done()

    def outcome(self) -> Saved | SaveFailed:
        """Wait for the end and return the outcome. Raises any error other than SaveFailed."""
        started = time.perf_counter()
        failure = self._saved.exception()
        self.stall_seconds += time.perf_counter() - started
        return (
            failure
            if isinstance(failure, SaveFailed)
            else replace(self._saved.result(), stall_seconds=self.stall_seconds)
        )

    def _run(self) -> None:
        try:
            saved = self._save()
        except BaseException as error:  # raised by `outcome`
            if isinstance(error, SaveFailed) and self.world.is_main:
                shutil.rmtree(commit.partial_of(self.final), ignore_errors=True)
            self.published.set()
            self._saved.set_exception(error)
        else:
            self._saved.set_result(saved)

    def _save(self) -> Saved:
        final, remote, step = self.final, self.remote, int(self.manifest["step"])
        self.files.write_all()
        self.reached("written")
        written, layouts = agree_on_files(self.world, self.files, final)
        size = on_main(self.world, lambda: self._publish(written, layouts), final)
        self.published.set()
        if self.verify:
            self._read_back(written)
        on_main(self.world, self._prune, final)
        if remote is not None:
            remote.upload(self.world, final, step, written)
        return Saved(
            path=final,
            url=remote.url_of(step) if remote is not None else None,
            step=step,
            tokens=self.manifest["data"]["tokens"],
            seconds=time.perf_counter() - self.started,
            stall_seconds=0.0,
            bytes=size,
            verified=self.verify or remote is not None,
        )

    def _publish(self, files: dict[str, Written], layouts: dict[str, Tensors]) -> int:
        partial = commit.partial_of(self.final)
        commit.add_unlisted_files(partial, files)
        if self.manifest["encryption"] is not None:  # only this user may read the folder
            partial.chmod(0o700)
        listed = {name: asdict(file) for name, file in files.items()}
        manifest = {**self.manifest, "layouts": layouts, "files": listed}
        size = commit.seal_folder(partial, manifest, self.reached)
        commit.publish(partial, self.final, self.reached)
        return size + sum(file.bytes for file in files.values())

    def _prune(self) -> None:
        for old in self.retention.to_delete(self.final.parent, self.final):
            commit.drop(old, self.reached)
        self.reached("done")

    def _read_back(self, files: dict[str, Written]) -> None:
        """Hash this rank's files again, from the disk. If any differs, the checkpoint is renamed and never chosen."""
        final = self.final
        mine = {name: asdict(file) for name, file in files.items() if file.rank == self.world.rank}
        problem = problem_of(lambda: check_hashes(final, {"files": mine}, mine), final)
        problem = next(filter(None, self.world.gather_objects(problem)), None)
        if problem is not None:
            on_main(self.world, self._rename_damaged, final)
            raise SaveFailed(f"checkpoint {final} differs from what was written and is set aside: {problem}")

    def _rename_damaged(self) -> None:
        commit.rename_damaged(self.final)
        if (previous := newest(self.final.parent)) is not None:
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
