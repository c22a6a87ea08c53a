"""Compute batches in worker processes, and keep each result in a file that outlives a kill.

The file (`data.array_file`) is named by a hash of its batch and of the work, so a preparation that starts again finds
the results of the one before it, and computes damaged ones again. Worker processes import this module, so it imports
little.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.array_file import Arrays, read_arrays, write_arrays
from data.text.workers import Workers

_AHEAD = 2
"""Batches in flight for each worker."""


@dataclass(frozen=True)
class Work:
    """The computation that worker processes apply to every batch."""

    make: Callable[..., Callable[[Any], Arrays]]
    """Called in each process, returns the function from a batch to its result."""
    arguments: tuple[Any, ...]
    identity: str
    """Differs whenever anything differs that determines a batch's result."""


def kept_folder(corpus: Path) -> Path:
    """The folder that keeps a corpus's results until it is published. corpus: folder of the finished corpus."""
    return corpus.with_name(f"{corpus.name}.pieces")


def results(work: Work, batches: Iterable[Any], workers: int, kept: Path | None) -> Generator[Arrays]:
    """The result of every batch, in order. At most two batches per worker are in flight, plus one. kept: a folder from
    `kept_folder`, which is created; None: results are not kept. Raises whatever a batch raises, and WorkerDied."""
    if kept is not None:
        kept.mkdir(exist_ok=True)
    queue: deque[Future[Arrays]] = deque()
    with Workers(workers, _keeping, work.make, *work.arguments) as pool:
        for batch in batches:
            while len(queue) >= _AHEAD * workers:
                yield queue.popleft().result()
            path = None if kept is None else result_path(kept, work.identity, batch)
            found = None if path is None else read_arrays(path)
            if found is None:
                queue.append(pool.submit((path, batch)))
            else:
                queue.append(Future())
                queue[-1].set_result(found[0])
        while queue:
            yield queue.popleft().result()


def _keeping(make: Callable[..., Callable[[Any], Arrays]], *arguments: Any) -> Callable[[Any], Arrays]:
    """The function that a worker applies to a path and a batch: it keeps the result at the path unless that is None."""
    function = make(*arguments)

    def compute(item: tuple[Path | None, Any]) -> Arrays:
        path, batch = item
        result = function(batch)
        if path is not None:
            path.parent.mkdir(exist_ok=True)
            write_arrays(path, result, {}, flushed=False)  # damaged by a power cut, it is computed again
        return result

    return compute


def result_path(folder: Path, identity: str, batch: Any) -> Path:
    """The file of a batch's result, in one of 256 folders because a large corpus has millions."""
    content = json.dumps(batch, default=repr).encode()
    key = hashlib.blake2b(content, digest_size=20, key=hashlib.sha256(identity.encode()).digest()).hexdigest()
    return folder / key[:2] / key[2:]
