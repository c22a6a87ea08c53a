"""Pieces of a preparation: the result of one batch each, in a file that outlives a kill and has any writer.

A piece is named by a hash of its batch and of the work, so it is the same whoever computes it, and a preparation that
starts again finds those of the one before it. Its file appears by a rename and begins with a checksum: after a power
cut it may be damaged, and is then computed again. Worker processes import this module, so it imports little.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

_FACTS = "facts"
_DIGEST_BYTES = 32


class Codec(Protocol):
    """How batches and results are written; its functions are called in worker processes, so it is pickled."""

    def pack(self, batch: Any) -> bytes:
        """A batch. Raises TypeError for one that cannot be written so that `unpack` gives the same."""

    def unpack(self, packed: bytes) -> Any:
        """The batch again."""

    def tensors(self, result: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """A result as tensors, and as facts that JSON can hold."""

    def result(self, tensors: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> Any:
        """The result again."""


@dataclass(frozen=True)
class Work:
    """What worker processes compute of every batch."""

    function: Callable[[Any], Any]
    start: Callable[..., None]
    """Initialises a worker process."""
    arguments: tuple[Any, ...]
    """Of `start`."""
    codec: Codec
    identity: str
    """Differs where anything does that decides the result of a batch."""


def piece_path(folder: Path, identity: str, packed: bytes) -> Path:
    """Where the piece of a batch is. In 256 folders, since a large corpus has millions."""
    key = hashlib.blake2b(packed, digest_size=20, key=hashlib.sha256(identity.encode()).digest()).hexdigest()
    return folder / key[:2] / key[2:]


def write_piece(path: Path, tensors: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
    """Write a piece, whole or not at all. Raises OSError."""
    content = save(tensors, {_FACTS: json.dumps(facts)})
    path.parent.mkdir(exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}-{os.urandom(4).hex()}")  # two machines may have the same process id
    try:
        aside.write_bytes(hashlib.sha256(content).digest() + content)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def read_piece(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """The content of a piece; None where there is none, or a damaged one."""
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


def compute(function: Callable[[Any], Any], codec: Codec, piece: Path | None, batch: Any) -> Any:
    """In a worker: the result of a batch, which is kept as a piece, if it has one."""
    result = function(batch)
    if piece is not None:
        write_piece(piece, *codec.tensors(result))
    return result


def compute_task(function: Callable[[Any], Any], codec: Codec, folder: Path, identity: str, task: Path) -> None:
    """In a helper's worker: keep the piece of the batch in a file."""
    packed = task.read_bytes()
    compute(function, codec, piece_path(folder, identity, packed), codec.unpack(packed))
