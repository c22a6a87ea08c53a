"""Compute batches in worker processes, and keep each result in a file that outlives a kill.

The file is named by a hash of its batch and of the work, so a preparation that starts again finds the results of the
one before it. It appears by a rename and begins with a checksum: after a power cut it may be damaged, and the result is
computed again. Worker processes import this module, so it imports little.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from data.text.workers import Workers

_FACTS = "facts"
_DIGEST_BYTES = 32
_AHEAD = 2
"""Batches for each worker that are in flight."""


class Codec(Protocol):
    """Names batches and writes results. Its functions are called in worker processes, so it is pickled."""

    def pack(self, batch: Any) -> bytes:
        """Bytes that no other batch has. Raises TypeError for a batch that has none, whose result is not kept."""

    def tensors(self, result: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """A result as tensors, and as facts that JSON can hold."""

    def result(self, tensors: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> Any:
        """The result again."""


@dataclass(frozen=True)
class Work:
    """The computation that worker processes apply to every batch."""

    function: Callable[[Any], Any]
    start: Callable[..., None]
    """Initialises a worker process."""
    arguments: tuple[Any, ...]
    """Arguments of `start`."""
    codec: Codec
    identity: str
    """Differs where anything does that decides the result of a batch."""


def kept_folder(corpus: Path) -> Path:
    """The folder of a corpus's results until it is published. corpus: the folder of the finished one."""
    return corpus.with_name(f"{corpus.name}.pieces")


def results(work: Work, batches: Iterable[Any], workers: int, kept: Path | None) -> Generator[Any]:
    """The result of every batch, in their order. At most two batches for each worker are in flight, and one more.

    kept: the folder of `kept_folder`, which is made; None: no result is kept. Raises what a batch raises, and
    WorkerDied.
    """
    if kept is not None:
        kept.mkdir(exist_ok=True)
    queue: deque[Future[Any]] = deque()
    with Workers(workers, work.start, *work.arguments) as pool:
        for batch in batches:
            while len(queue) >= _AHEAD * workers:
                yield queue.popleft().result()
            queue.append(_result(work, batch, pool, kept))
        while queue:
            yield queue.popleft().result()


def _result(work: Work, batch: Any, pool: Workers, kept: Path | None) -> Future[Any]:
    path = None
    with suppress(TypeError):
        path = None if kept is None else result_path(kept, work.identity, work.codec.pack(batch))
    found = None if path is None else read_result(path)
    if found is None:
        return pool.submit(_compute, work.function, work.codec, path, batch)
    known: Future[Any] = Future()
    known.set_result(work.codec.result(*found))
    return known


def _compute(function: Callable[[Any], Any], codec: Codec, path: Path | None, batch: Any) -> Any:
    """Compute a result in a worker, and keep it at `path`."""
    result = function(batch)
    if path is not None:
        write_result(path, *codec.tensors(result))
    return result


def result_path(folder: Path, identity: str, packed: bytes) -> Path:
    """The file of a batch's result, in one of 256 folders, since a large corpus has millions."""
    key = hashlib.blake2b(packed, digest_size=20, key=hashlib.sha256(identity.encode()).digest()).hexdigest()
    return folder / key[:2] / key[2:]


def write_result(path: Path, tensors: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
    """Write a result, whole or not at all. Raises OSError."""
    content = save(tensors, {_FACTS: json.dumps(facts)})
    path.parent.mkdir(exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    try:
        aside.write_bytes(hashlib.sha256(content).digest() + content)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def read_result(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Tensors and facts of a result; None where there is none, or a damaged one."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, content = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        return None
    with suppress(SafetensorError):  # the header, from which `load` gives no metadata
        length = int.from_bytes(content[:8], "little")
        return load(content), json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_FACTS])
    return None
