"""The processes of several machines tokenize one corpus together, through the folder that its pieces are kept in.

The process that holds the corpus's lock reads the source, writes the corpus, and has workers of its own, as ever. On
every other machine one of the processes that wait for it helps, with as many workers:

    <cache_dir>/<fingerprint>.pieces/
        work.json             which machine reads, what is computed (`Work.identity`), and `tokenizer/` for it
        helpers/<machine>     who helps: JSON; <machine>.lock is held by it
        open/<number>         a batch that nobody has yet
        taken/<number>.<machine>    one that a helper has; it gets it by renaming the file, and removes it when done
        done/                 see `pieces`

The reader takes the pieces in the order of the batches, so the corpus does not depend on who computed what, and nothing
that it waits for has to come: a batch that nobody has taken when it is needed, or whose helper gave up, is dead (its
lock can be had) or silent, is computed here. A dead reader leaves its lock, which one of those who wait takes; what was
computed until then is found by its hash. On a file system over a network all this needs what the lock of `data.prepare`
needs: file locks that end with their holder, and renames that one process wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from config import json_text
from config.files import write_atomically
from config.machine.processes import machine
from data.pieces import Work, compute, compute_task, piece_path, read_piece
from data.workers import WorkerDied, Workers

_POLL_SECONDS = 0.02
_LOOK_SECONDS = 0.5
"""Between looks at who helps."""
_PATIENCE_SECONDS = 60.0
"""So long the reader waits for a batch that a live helper has taken."""
_AHEAD = 2
"""Batches for each worker that are in flight."""


@dataclass(frozen=True)
class _Helping:
    """Who helps."""

    host: str
    pid: int
    workers: int


class Pieces:
    """The folder of a corpus's pieces."""

    def __init__(self, corpus: Path) -> None:
        """corpus: the folder of the finished corpus."""
        self.folder = corpus.with_name(f"{corpus.name}.pieces")
        self.done, self.helpers = self.folder / "done", self.folder / "helpers"
        self.open, self.taken = self.folder / "open", self.folder / "taken"
        self.tokenizer = self.folder / "tokenizer"

    def begin(self, work: Work, tokenizer: Path, settings: dict[str, Any]) -> None:
        """Offer to share a work. What an earlier reader had open is dropped, what was done stays.

        tokenizer: its folder. settings: keys of the data section that were decided since. Raises OSError.
        """
        for folder in (self.open, self.taken, self.tokenizer):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.done, self.helpers, self.open, self.taken):
            folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(tokenizer, self.tokenizer)
        terms = {"machine": short_name(), "identity": work.identity, "settings": settings}
        write_atomically(self.folder / "work.json", json.dumps(terms).encode())

    def terms(self) -> dict[str, Any] | None:
        """What `begin` wrote; None where nothing is shared."""
        try:
            return json_text.parse((self.folder / "work.json").read_bytes())
        except (OSError, ValueError):
            return None

    def remove(self) -> None:
        """Of a finished corpus, or one that cannot be."""
        shutil.rmtree(self.folder, ignore_errors=True)


def short_name() -> str:
    """Of this machine, in names of files."""
    return hashlib.sha256(machine().encode()).hexdigest()[:12]


@dataclass(frozen=True)
class _Placed:
    """A batch and who computes it: a worker here, or a helper, or it is a piece already."""

    number: int
    batch: Any
    """None while a worker here has it."""
    piece: Path | None
    future: Future[Any] | None = None


class Reader:
    """Computes batches in workers here and on other machines; to be used by the process that holds the lock."""

    def __init__(self, pieces: Pieces | None, work: Work, workers: int) -> None:
        """pieces: None: nothing is shared or kept."""
        self._pieces, self._work, self._workers = pieces, work, workers
        self._helping: dict[str, _Helping] = {}
        self._lost: set[str] = set()
        self._next_look = 0.0

    def results(self, batches: Iterable[Any]) -> Generator[Any]:
        """The result of every batch, in their order. At most two batches for each worker are in flight, and one more.

        Raises what computing a batch raises, WorkerDied, and OSError where a piece cannot be written.
        """
        queue: deque[_Placed] = deque()
        with Workers(self._workers, self._work.start, *self._work.arguments) as self._pool:
            for number, batch in enumerate(batches):
                self._look()
                while len(queue) >= _AHEAD * (self._workers + sum(each.workers for each in self._helping.values())):
                    yield self._result(queue.popleft())
                queue.append(self._placed(number, batch, queue))
            while queue:
                yield self._result(queue.popleft())

    def _placed(self, number: int, batch: Any, queue: Iterable[_Placed]) -> _Placed:
        try:
            packed = self._work.codec.pack(batch) if self._pieces is not None else None
        except TypeError:
            packed = None
        if self._pieces is None or packed is None:
            return self._here(_Placed(number, batch, None))
        piece = piece_path(self._pieces.done, self._work.identity, packed)
        placed = _Placed(number, batch, piece)
        if piece.exists():
            return placed
        if self._helping and sum(each.future is not None for each in queue) >= _AHEAD * self._workers:
            aside = self._pieces.folder / "next"
            aside.write_bytes(packed)
            aside.replace(self._pieces.open / f"{number:012d}")
            return placed
        return self._here(placed)

    def _here(self, placed: _Placed) -> _Placed:
        arguments = (self._work.function, self._work.codec, placed.piece, placed.batch)
        return _Placed(placed.number, None, placed.piece, self._pool.submit(compute, *arguments))

    def _result(self, placed: _Placed) -> Any:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while placed.future is None:
            assert self._pieces is not None and placed.piece is not None
            # asked before the look: it may be done in between
            expected = self._expected(self._pieces, placed.number, deadline)
            kept = read_piece(placed.piece)
            if kept is not None:
                return self._work.codec.result(*kept)
            if not expected:
                placed = self._here(placed)
                break
            time.sleep(_POLL_SECONDS)
        assert placed.future is not None
        return placed.future.result()

    def _expected(self, pieces: Pieces, number: int, deadline: float) -> bool:
        """Whether a helper computes this batch. One that nobody has taken is taken back."""
        with suppress(FileNotFoundError):
            (pieces.open / f"{number:012d}").unlink()
            return False
        holder = next(pieces.taken.glob(f"{number:012d}.*"), None)
        if holder is None:
            return False
        name = holder.suffix.removeprefix(".")
        if name in self._lost:
            return False
        if _dead(pieces, name):
            self._lose(name, "has ended")
        elif time.monotonic() >= deadline:
            self._lose(name, f"has not answered for {_PATIENCE_SECONDS:g} s")
        return name not in self._lost

    def _lose(self, name: str, how: str) -> None:
        known = self._helping.get(name)
        who = f"process {known.pid} on {known.host}" if known else "a process of another machine"
        print(f"data: {who}, which tokenized a part, {how}; its part is done here", file=sys.stderr, flush=True)
        self._lost.add(name)
        self._helping.pop(name, None)

    def _look(self) -> None:
        """See who helps."""
        if self._pieces is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        found = {}
        with suppress(OSError):
            for path in self._pieces.helpers.iterdir():
                if path.suffix or path.name.startswith(".") or path.name in self._lost:
                    continue
                with suppress(OSError, ValueError, TypeError):
                    found[path.name] = _Helping(**json_text.parse(path.read_bytes()))
        self._helping = found


def _dead(pieces: Pieces, name: str) -> bool:
    """Whether a helper's process has ended: its lock can be had."""
    try:
        with FileLock(pieces.helpers / f"{name}.lock", timeout=0):
            return True
    except Timeout:
        return False


class Helper:
    """Computes batches of a reader on another machine, for as long as this process waits for it.

    Of the processes of a machine one helps. It stops for good when one of its workers dies, which the reader makes up.
    """

    def __init__(self, pieces: Pieces, workers: int, work: Callable[[Path, dict[str, Any]], Work]) -> None:
        """work: of a tokenizer's folder and the settings of `Pieces.begin`, what the reader computes."""
        self._pieces, self._count, self._make = pieces, workers, work
        self._lock = FileLock(pieces.helpers / f"{short_name()}.lock")
        self._work: Work | None = None
        self._workers: Workers | None = None
        self._running: dict[Path, Future[None]] = {}
        self._over = False
        self.computed = 0
        """[batches]"""

    @property
    def ready(self) -> bool:
        """Whether the reader counts on it."""
        return self._workers is not None

    def close(self) -> None:
        """Stop; a batch that is not done is left to the reader."""
        if self._workers is not None:
            self._workers.__exit__()
            with suppress(OSError):
                (self._pieces.helpers / short_name()).unlink()
        self._workers, self._running, self._over = None, {}, True
        self._lock.release()

    def turn(self) -> None:
        """Take batches, if there are any, and see to those that are done. Returns at once."""
        terms = None if self._over else self._pieces.terms()
        if terms is None or terms["machine"] == short_name():
            return
        try:
            self._collect()
            if self._ready(terms):
                self._take()
        except (OSError, ValueError):
            pass  # the folder went while it was read: the corpus is finished, or cannot be
        except WorkerDied:
            self.close()

    def _ready(self, terms: dict[str, Any]) -> bool:
        """Whether this process is the machine's helper, and computes the same as the reader."""
        if self._workers is None:
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                return False
        if self._work is None or self._work.identity != terms["identity"]:
            self._work = self._make(self._pieces.tokenizer, terms["settings"])
            if self._workers is not None:
                self._workers.__exit__()
                self._workers, self._running = None, {}
        if self._work.identity != terms["identity"]:  # other versions are installed here
            self.close()
            return False
        if self._workers is None:
            self._workers = Workers(self._count, self._work.start, *self._work.arguments)
            mine = _Helping(socket.gethostname(), os.getpid(), self._count)
            write_atomically(self._pieces.helpers / short_name(), json.dumps(asdict(mine)).encode())
        return True

    def _take(self) -> None:
        assert self._workers is not None and self._work is not None
        for path in sorted(self._pieces.open.iterdir()):
            if len(self._running) >= _AHEAD * self._count:
                return
            mine = self._pieces.taken / f"{path.name}.{short_name()}"
            with suppress(FileNotFoundError):  # somebody else was faster
                path.rename(mine)
                given = (self._work.function, self._work.codec, self._pieces.done, self._work.identity, mine)
                self._running[mine] = self._workers.submit(compute_task, *given)

    def _collect(self) -> None:
        for path, future in list(self._running.items()):
            if not future.done():
                continue
            del self._running[path]
            path.unlink(missing_ok=True)
            error = future.exception()
            if isinstance(error, WorkerDied):
                raise error
            self.computed += error is None
