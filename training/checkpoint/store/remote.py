"""A run's checkpoints in an object store. Each is published in the run folder, then uploaded in the background by the
ranks that wrote it, manifest and LATEST last. A run that starts fetches what its folder lacks."""

import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from config.errors import UserError
from training.checkpoint import commit
from training.checkpoint.choice import by_step, manifest_in, newest, step_of
from training.checkpoint.manifest import MANIFEST, Unusable, Written, read_manifest, shares_of
from training.checkpoint.outcome import NotUploaded, SaveFailed, on_main
from training.checkpoint.retention import Retention
from training.checkpoint.run_record import Order, Record, order_in, read_record
from training.checkpoint.store.errors import StoreError
from training.checkpoint.store.store import Store
from training.distributed import World

T = TypeVar("T")


class Remote:
    """One run's folder in a store. Every method is a collective."""

    def __init__(self, store: Store, keep: Retention) -> None:
        # a step that is saved again, as after a rollback, is deleted first
        self.store, self.keep = store, replace(keep, newest=max(keep.newest, 2))

    def url_of(self, step: int) -> str:
        return f"{self.store.url}/step-{step}"

    def upload(self, world: World, folder: Path, step: int, files: dict[str, Written]) -> None:
        """Upload the published checkpoint `folder`, then delete the expired ones, and older ones in the run folder that
        the store has. Raises NotUploaded on every rank."""
        there = self.url_of(step)
        try:
            on_main(world, lambda: self.store.delete(step), there)
            problem = None
            try:
                for name, file in files.items():
                    if file.rank == world.rank:
                        self.store.upload(folder / name, f"step-{step}/{name}", sha256=file.sha256, size=file.bytes)
            except OSError as error:
                problem = f"checkpoint {there} was not saved: {error}"
            world.raise_first(problem, SaveFailed)
            on_main(world, lambda: self._publish(folder, step), there)
        except SaveFailed as failure:
            raise NotUploaded(str(failure)) from failure

    def make_up(self, world: World, folder: Path) -> str | None:
        """Upload the checkpoint `folder` if the store lacks it, as after an upload that failed; returns a line that
        says so. Raises UserError if the store cannot be reached, NotUploaded if the upload fails again."""
        manifest = world.from_main(read_manifest(folder) if world.is_main else None)
        step = int(manifest["step"])
        if _asked(world, lambda: self._manifest(step) == manifest):
            return None
        shares = enumerate(shares_of(manifest, world.world_size))
        files = {
            name: replace(Written(**manifest["files"][name]), rank=rank) for rank, names in shares for name in names
        }
        self.upload(world, folder, step, files)
        return f"checkpoint {self.url_of(step)}: uploaded now, which an earlier session did not end"

    def fetch(self, world: World, folder: Path, beside: Collection[Path]) -> dict[Path, str]:
        """Fetch the store's newest checkpoint into the run's checkpoints folder, unless that has a newer one that is
        not in `beside`; returns those that are passed over, each with a line that says why. Raises UserError, on every
        rank, if the store cannot be reached or the folder not be written: a run must not start from scratch because a
        network is down."""
        newer, passed_over = _asked(world, lambda: self._find_newer(folder, beside))
        for step, manifest in newer:
            try:
                problem = self._fetch(world, folder, step, manifest)
            except SaveFailed as failure:
                reason = f"cannot be fetched to {folder}: {failure}"
                raise UserError(f"checkpoint.dir = {self.url_of(step)} {reason}") from failure
            if problem is None:
                break
            passed_over[Path(self.url_of(step))] = f"{self.url_of(step)}: {problem}"
        return passed_over

    def orders(self, world: World) -> list[Order]:
        """The orders of all checkpoints in the store. Raises UserError, on every rank, if it cannot be reached."""

        def read() -> list[Order]:
            return [order_in(manifest) for _, manifest in self.store.candidates() if isinstance(manifest, dict)]

        return _asked(world, read)

    def _publish(self, folder: Path, step: int) -> None:
        self.store.publish(step, (folder / MANIFEST).read_text(encoding="utf-8"))
        there, record = self.store.steps(), read_record(folder.parent)
        for path in by_step(folder.parent):  # what the store lacks stays, as the run folder's own rules have it
            older = step_of(path)
            if older < step and older in there and self._manifest(older) == manifest_in(path):
                commit.drop(path)
        for old in self.keep.expired(there, step, self._manifest, record):
            self.store.delete(old)
        for old in self.store.unfinished():
            if old < step:
                self.store.delete(old)

    def _manifest(self, step: int) -> dict[str, Any] | None:
        with suppress(Unusable):
            return self.store.manifest(step)
        return None

    def _find_newer(
        self, folder: Path, beside: Collection[Path]
    ) -> tuple[list[tuple[int, dict[str, Any]]], dict[Path, str]]:
        """Steps and manifests newer than those in the run folder, best first; and why others are passed over."""
        newer, passed_over = list[tuple[int, dict[str, Any]]](), dict[Path, str]()
        local, record = newest(folder, beside), read_record(folder)
        mine = read_manifest(local) if local is not None else None
        for step, manifest in self.store.candidates(record):
            problem: Unusable | str | None = None
            if isinstance(manifest, Unusable):
                problem = manifest
            elif manifest["step"] != step:
                problem = f"{MANIFEST} is of step {manifest['step']}"
            elif record is not None and (other := record.other_than(manifest)):
                problem = f"{MANIFEST} is of {other}"
            elif mine is not None and not _is_newer(manifest, mine, record):
                break
            else:
                newer.append((step, manifest))
            if problem is not None:
                passed_over[Path(self.url_of(step))] = f"{self.url_of(step)}: {problem}"
        return newer, passed_over

    def _fetch(self, world: World, folder: Path, step: int, manifest: dict[str, Any]) -> str | None:
        """Why the checkpoint is damaged, or None. Each rank fetches a share of the bytes. Raises SaveFailed, on every
        rank, if the store does not answer or the disk is full."""
        final = folder / f"step-{step}"
        partial = commit.partial_of(final)
        on_main(world, lambda: commit.begin(final), final)
        problem = None
        try:
            for name in shares_of(manifest, world.world_size)[world.rank]:
                entry, private = manifest["files"][name], bool(manifest.get("encryption"))
                target = {"sha256": entry["sha256"], "size": entry["bytes"], "private": private}
                self.store.download(f"step-{step}/{name}", partial / name, **target)
        except (Unusable, OSError) as error:
            problem = isinstance(error, Unusable), str(error)
        problems = [found for found in world.gather_objects(problem) if found]
        if not problems:
            on_main(world, lambda: commit.seal_folder(partial, manifest), final)
            on_main(world, lambda: commit.publish(partial, final), final)
            return None
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        damaged, text = min(problems)
        if not damaged:
            raise SaveFailed(text)
        return text


def _asked(world: World, ask: Callable[[], T]) -> T:
    """Rank 0's answer from the store, on every rank. Raises UserError, on every rank, when it cannot be reached."""
    try:
        return world.on_main(ask, catch=(StoreError,))
    except UserError as error:
        raise UserError(f"checkpoint.dir = {error}") from None


def _is_newer(there: dict[str, Any], here: dict[str, Any], record: Record | None) -> bool:
    """Whether a manifest in the store is newer than the newest one in the run folder."""
    if "went_back" not in there and "went_back" not in here:
        return bool((there["written"], there["step"]) > (here["written"], here["step"]))

    def place(manifest: dict[str, Any]) -> tuple[bool, Order, str]:
        return record is None or not record.left(order_in(manifest)), order_in(manifest), manifest["written"]

    return place(there) > place(here)
