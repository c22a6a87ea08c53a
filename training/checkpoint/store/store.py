"""Checkpoints in an object store: s3://, gs://, abfs://, or any other file system that fsspec knows. In place of rename
and flush, objects appear whole or not at all, every file is hashed again after its upload, and the manifest, without
which there is no checkpoint, is uploaded last and deleted first. Every operation is retried, and nothing is cached."""

import hashlib
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

from config.errors import UserError, one_line
from config.files import file_sha256
from config.redact import redact
from config.secrets import refuse_secrets
from training.checkpoint.choice import LATEST, newest_first
from training.checkpoint.manifest import MANIFEST, NAME, Damaged, Unusable, parse_manifest
from training.checkpoint.run_record import Record
from training.checkpoint.store.errors import StoreError, describe, is_missing, is_transient

PART = 1 << 25
"""[bytes] Part of a multipart upload, and size of a ranged read."""
AT_ONCE = 4
"""Parts of one file in flight at a time: each rank holds this many parts in memory."""
MOST_PARTS = 10_000
"""S3's limit on the parts of one object."""

T = TypeVar("T")


class Missing(StoreError):
    """The object is not there, though its bucket is."""


class _ContentDiffers(Exception):
    """The store's content differs from the content sent; a retry may help."""


class StoreFiles:
    """Files under one URL, named by their path from it, for any thread. Every method raises StoreError when the store
    does not answer as it should: at once if a retry cannot help, else after `attempts` tries."""

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        attempts: int = 8,
        first_wait: float = 0.5,
        longest_wait: float = 30.0,
        part: int = PART,
    ) -> None:
        """options: fsspec's. attempts: tries of each operation; waits between them double from first_wait to
        longest_wait [s], each shortened at random by up to half. part: bytes. Raises UserError when no file system is
        installed for the URL, or a secret is in it or in the options."""
        refuse_secrets(url, options or {})
        self.url, self._part = url.rstrip("/"), part
        self._attempts, self._first_wait, self._longest_wait = attempts, first_wait, longest_wait
        self.retries = 0
        """Retries of all operations so far."""
        self._retries_lock = threading.Lock()
        self._options = _with_defaults(url, options or {})
        self._fs, self._root = self._connect()

    def upload(self, local: Path, name: str, *, sha256: str, size: int) -> None:
        """Store a file under `name` and read it back: its SHA-256 and size [bytes] must match."""

        def send_and_read_back() -> None:
            chunk = max(self._part, math.ceil(size / MOST_PARTS))
            in_parts = {"chunksize": chunk, "max_concurrency": AT_ONCE} if _is_s3(self._fs) else {}
            self._fs.put_file(str(local), self._path(name), **in_parts)
            try:
                self._require(name, sha256, size)
            except _ContentDiffers:
                if file_sha256(local) != sha256:
                    raise StoreError(f"{local}: changed since it was written, so it is not uploaded") from None
                raise

        self._retried("upload", name, send_and_read_back)

    def upload_text(self, name: str, text: str) -> None:
        """Store a small file under `name`, and read it back."""

        def send_and_read_back() -> None:
            self._fs.pipe_file(self._path(name), text.encode())
            if self._fs.cat_file(self._path(name)) != text.encode():
                raise _ContentDiffers("reads back with different content")

        self._retried("upload", name, send_and_read_back)

    def read_text(self, name: str) -> str | None:
        """The content of a small file; None when there is none."""
        try:
            content = self._retried("read", name, lambda: self._fs.cat_file(self._path(name)))
        except Missing:
            return None
        return cast(bytes, content).decode(errors="replace") or None

    def download(self, name: str, local: Path, *, sha256: str, size: int, private: bool = False) -> None:
        """Fetch a file; `local` appears complete or not at all. private: only this user may read it. Raises Damaged if
        it is missing, or has another SHA-256 in two fetches; OSError if it cannot be written to disk."""
        partial = local.with_name(f".{local.name}.partial")
        try:
            for _ in range(2):
                found = self._fetch(name, partial, size, private)
                if found == sha256:
                    partial.replace(local)
                    return
            raise Damaged(f"{self.url}/{name} has SHA-256 {found[:12]}...; it was written with {sha256[:12]}...")
        finally:
            partial.unlink(missing_ok=True)

    def _connect(self) -> tuple[Any, str]:
        import fsspec  # which most runs do not need

        try:
            system, root = fsspec.core.url_to_fs(self.url, **self._options)
        except ImportError as error:
            raise UserError(f"checkpoint.dir = {self.url}: {error}") from error
        except (ValueError, TypeError, KeyError) as error:
            message = redact(one_line(error))
            raise UserError(f"checkpoint.dir = {self.url} with its storage_options: {message}") from error
        if _is_s3(system):
            system.retries = 1  # s3fs itself need not retry: its client and this class do
        return system, root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        with suppress(Missing):
            self._retried("delete", name, lambda: self._fs.rm_file(self._path(name)))

    def find(self, folder: str = "") -> list[str]:
        """The names of all objects in a folder, relative to the URL."""
        where = self._path(folder).rstrip("/")
        try:
            found = self._retried("list", folder, lambda: list(self._fs.find(where)))
        except Missing:
            return []
        return [path.removeprefix(f"{self._root}/") for path in found]

    def _require(self, name: str, sha256: str, size: int) -> None:
        if (found := self._size(name)) != size:
            raise _ContentDiffers(f"reads back with {found:,} bytes, was written with {size:,}")
        digest = hashlib.sha256()
        for block in self._blocks(name, size):
            digest.update(block)
        if (other := digest.hexdigest()) != sha256:
            raise _ContentDiffers(f"reads back with SHA-256 {other[:12]}..., was written with {sha256[:12]}...")

    def _fetch(self, name: str, partial: Path, size: int, private: bool) -> str:
        digest = hashlib.sha256()
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(handle, "wb") as file:
            try:
                if (found := self._size(name)) != size:
                    raise Damaged(f"{self.url}/{name} has {found:,} bytes; it was written with {size:,}")
                for block in self._blocks(name, size):
                    digest.update(block)
                    file.write(block)
            except Missing as error:
                raise Damaged(f"{self.url}/{name} is missing") from error
            file.flush()
            os.fsync(file.fileno())
        return digest.hexdigest()

    def _size(self, name: str) -> int:
        return self._retried("read", name, lambda: self._fs.info(self._path(name)))["size"]

    def _blocks(self, name: str, size: int) -> Iterator[bytes]:
        """The object's bytes in order, read ahead in ranges."""

        def read(start: int) -> bytes:
            end = min(start + self._part, size)
            return self._retried("read", name, lambda: self._range(name, start, end))

        with ThreadPoolExecutor(max_workers=AT_ONCE) as readers:
            starts = iter(range(0, size, self._part))
            ahead = [readers.submit(read, start) for start in islice(starts, AT_ONCE)]
            while ahead:
                block = ahead.pop(0).result()
                ahead += [readers.submit(read, start) for start in islice(starts, 1)]
                yield block

    def _range(self, name: str, start: int, end: int) -> bytes:
        block = self._fs.cat_file(self._path(name), start=start, end=end)
        if len(block) != end - start:
            raise _ContentDiffers(f"gives {len(block):,} of the {end - start:,} bytes from {start:,} on")
        return block

    def _retried(self, what: str, name: str, act: Callable[[], T]) -> T:
        """The result of `act`. Raises StoreError."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return act()
            except (StoreError, Damaged):
                raise
            except Exception as error:
                retry = isinstance(error, _ContentDiffers) or is_transient(error)
                if not retry or attempt >= self._attempts:
                    tries = f" after {attempt} tries" if attempt > 1 else ""
                    kind = Missing if is_missing(error) else StoreError
                    raise kind(f"{self.url}/{name}: cannot {what}{tries}: {describe(error)}") from error
            with self._retries_lock:
                self.retries += 1
            wait = min(self._longest_wait, self._first_wait * 2 ** (attempt - 1))
            time.sleep(wait * random.uniform(0.5, 1.0))


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

    def require_usable(self, *, empty: bool = False) -> None:
        """Write, list and delete a small object, to find problems before training starts. empty: there must be no
        checkpoints, which would be mixed up with another run's. Raises UserError."""
        name = f".probe-{os.getpid()}-{random.getrandbits(32):08x}"
        try:
            self.upload_text(name, "Mantissa was here\n")
            steps = self.steps()
            self.remove(name)
        except StoreError as error:
            raise UserError(f"checkpoint.dir = {error}") from error
        if empty and steps:
            raise UserError(
                f"checkpoint.dir = {self.url}: holds checkpoints of an earlier run, up to step {steps[-1]}, while "
                "run.resume = never; use another run.name or checkpoint.dir, or delete them"
            )

    def _listing(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for path in self.find():
            folder, _, name = path.partition("/")
            match = NAME.fullmatch(folder)
            if match and name:
                found.setdefault(int(match[1]), set()).add(name)
        return found


def _is_s3(system: Any) -> bool:
    return "s3" in ((system.protocol,) if isinstance(system.protocol, str) else system.protocol)


def _with_defaults(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """fsspec's options: nothing is cached between calls; S3's client tries a request three times, and leaves checking
    what it reads to our hashes."""
    found = {"use_listings_cache": False, "skip_instance_cache": True, **options}
    protocol = url.partition("://")[0]
    if protocol in ("s3", "s3a"):
        config = dict(found.get("config_kwargs") or {})
        config.setdefault("retries", {"mode": "standard", "total_max_attempts": 3})
        config.setdefault("response_checksum_validation", "when_required")
        found["config_kwargs"] = config
    if protocol in ("file", "local"):
        found.setdefault("auto_mkdir", True)
    return found
