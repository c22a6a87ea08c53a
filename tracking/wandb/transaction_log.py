"""Read and repair wandb's own file of a run, which may lack what a full disk refused or a kill lost.

The file follows LevelDB's log format: blocks of 32 KiB, in them pieces of a 7-byte header (checksum, length, kind) and
a payload. Of an offline run it is the only copy. wandb writes whole blocks, so the file lags behind.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MIN_FREE_BYTES = 4 << 20
"""Free space below which nothing more is logged to an offline run: the rest of the disk is for the events."""

_HEADER, _BLOCK = 7, 1 << 15
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_LAST_BLOCKS = 4
_STABLE_S, _MAX_WAIT_S = 1.0, 5.0


class IncompleteFile(RuntimeError):
    """wandb's file is not complete, and a retry would not help."""


def require_free_space(path: Path) -> None:
    """Raise IncompleteFile when the disk of `path` is nearly full."""
    if shutil.disk_usage(path.parent).free < MIN_FREE_BYTES:
        raise IncompleteFile("no space left on its disk")


def wait_until_stable(path: Path) -> None:
    """Wait until the file no longer grows: wandb's helper may still be writing after it was signalled."""
    until, size, since = time.monotonic() + _MAX_WAIT_S, -1, 0.0
    while time.monotonic() < until:
        new_size = path.stat().st_size if path.exists() else 0
        if new_size != size:
            size, since = new_size, time.monotonic()
        elif time.monotonic() - since > _STABLE_S:
            return
        time.sleep(_STABLE_S / 10)


def require_exit_record(path: Path) -> None:
    """Raise IncompleteFile when the file of a finished run does not get its exit record soon."""
    until = time.monotonic() + _MAX_WAIT_S
    while not _has_exit_record(path):
        if time.monotonic() > until:
            raise IncompleteFile(f"{path.name} is incomplete; the disk may be full")
        time.sleep(_STABLE_S / 10)


def _has_exit_record(path: Path) -> bool:
    return path.exists() and any(kind == "exit" for kind, _, _ in records(path, _LAST_BLOCKS))


def last_step(path: Path) -> int:
    """The newest `_step` of the rows in a file that is being written; 0 for no row, or no file."""
    blocks, size = _LAST_BLOCKS, path.stat().st_size if path.exists() else 0
    while size:
        steps = [_step(record) for kind, record, _ in records(path, blocks) if kind == "history"]
        if steps:
            return steps[-1]
        if blocks * _BLOCK >= size:
            return 0
        blocks *= 8  # a record may be longer than the blocks that were read
    return 0


def repair(path: Path) -> int:
    """Cut off what follows the last whole record; returns the newest `_step` that is left.

    `wandb sync` stops at damage and ignores the files of later sessions. A file without a run record stops it
    altogether, and is renamed.
    """
    end, newest, has_run = 0, 0, False
    for kind, record, position in records(path):
        end = position
        has_run = has_run or kind == "run"
        if kind == "history":
            newest = _step(record)
    if not has_run:
        path.rename(path.with_name(path.name + ".empty"))
    elif path.stat().st_size > end:
        os.truncate(path, end)
    return newest


def repair_all(folder: Path) -> int:
    """Repair the files of earlier sessions that ended before wandb did. None may be in use.

    Returns the newest `_step` in the last session's file when that was repaired and has one, else 0.
    """
    newest = 0
    for path in sorted(folder.glob("*run-[0-9]*/*.wandb"), key=lambda path: path.parent.name.partition("run-")[2]):
        newest = 0 if _has_exit_record(path) else repair(path)
    return newest


def _step(record: Any) -> int:
    return int(record.history.step.num)


def records(path: Path, blocks: int | None = None) -> Iterator[tuple[str, Any, int]]:
    """Kind, content and end in the file of each record in the last blocks, up to the first damage."""
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2 as stored

    for message, end in _messages(path, blocks):
        try:
            record = stored.Record.FromString(message)  # type: ignore[attr-defined]
        except DecodeError:
            return
        yield record.WhichOneof("record_type") or "", record, end


def _messages(path: Path, blocks: int | None) -> Iterator[tuple[bytes, int]]:
    """Each whole record in the last blocks of the file (None: in all) and where it ends, up to the first damage."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = 0 if blocks is None else max(0, (size + _BLOCK - 1) // _BLOCK - blocks) * _BLOCK
        file.seek(start)
        content = file.read()
    position = 0 if start else _HEADER  # the file begins with a header of 7 bytes
    message: bytes | None = None  # None in a record that began before these blocks
    while position + _HEADER <= len(content):
        if (left := _BLOCK - position % _BLOCK) < _HEADER:  # a header never crosses blocks
            position += left
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        piece = content[position + _HEADER : position + _HEADER + length]
        if len(piece) < length or kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST):
            return
        position += _HEADER + length
        if kind in (_WHOLE, _FIRST):
            message = piece
        elif message is not None:
            message += piece
        if kind in (_WHOLE, _LAST) and message is not None:
            yield message, start + position
            message = None
