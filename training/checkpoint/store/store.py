"""Checkpoints in an object store: s3://, gs://, abfs://, or any other file system that fsspec knows. In place of rename
and flush, objects appear whole or not at all, every file is hashed again after its upload, and the manifest, without
which there is no checkpoint, is uploaded last and deleted first."""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from config.errors import UserError
from training.checkpoint.choice import LATEST, newest_first
from training.checkpoint.manifest import MANIFEST, NAME, Damaged, Unusable, parse_manifest
from training.checkpoint.run_record import Record
from training.checkpoint.store.errors import StoreError
from training.checkpoint.store.files import AT_ONCE, StoreFiles


class Store(StoreFiles):
    """The checkpoints of one run in a store. Nothing here is a collective."""

    def steps(self) -> list[int]:
        """The steps with a manifest, in order."""
        return sorted(step for step, names in self._listing().items() if MANIFEST in names)

    def unfinished(self) -> list[int]:
        """The steps with files but no manifest: half uploaded, or half deleted."""
        return sorted(step for step, names in self._listing().items() if MANIFEST not in names)

    def candidates(self, record: Record | None = None) -> list[tuple[int, dict[str, Any] | Unusable]]:
        """Steps with their manifests, the newest first (`newest_first`); an unusable one comes with its problem."""

        def read(step: int) -> dict[str, Any] | Unusable:
            try:
                return self.manifest(step)
            except Unusable as problem:
                return problem

        with ThreadPoolExecutor(max_workers=AT_ONCE) as readers:
            steps = self.steps()
            found = dict(zip(steps, readers.map(read, steps), strict=True))
        named = NAME.fullmatch((self.read_text(LATEST) or "").strip())
        known = {step: manifest if isinstance(manifest, dict) else None for step, manifest in found.items()}
        return [(step, found[step]) for step in newest_first(known, named and int(named[1]), record)]

    def manifest(self, step: int) -> dict[str, Any]:
        """The manifest of a checkpoint, with its seal checked. Raises Damaged or Unusable like `parse_manifest`."""
        text = self.read_text(f"step-{step}/{MANIFEST}")
        if text is None:
            raise Damaged(f"{MANIFEST} is missing")
        return parse_manifest(text.encode())

    def publish(self, step: int, manifest: str) -> None:
        """Upload the sealed manifest of `step`, after all its files, then LATEST."""
        self.upload_text(f"step-{step}/{MANIFEST}", manifest)
        self.upload_text(LATEST, f"step-{step}\n")

    def delete(self, step: int) -> None:
        """Delete a checkpoint, its manifest first, so that a half-deleted one is never chosen."""
        self.remove(f"step-{step}/{MANIFEST}")
        for name in self.find(f"step-{step}"):
            self.remove(name)

    def require_usable(self) -> None:
        """Write, list and delete a small object, to find problems before training starts. Raises UserError."""
        name = f".probe-{os.getpid()}-{random.getrandbits(32):08x}"
        probe = Store(self.url, self._options, attempts=min(3, self._attempts), first_wait=self._first_wait)
        try:
            probe.upload_text(name, "Mantissa was here\n")
            probe.steps()
            probe.remove(name)
        except StoreError as error:
            raise UserError(f"checkpoint.dir = {error}") from error

    def _listing(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for path in self.find():
            folder, _, name = path.partition("/")
            match = NAME.fullmatch(folder)
            if match and name:
                found.setdefault(int(match[1]), set()).add(name)
        return found
