"""Token shards: what preparation writes and training reads, memory-mapped and checksummed.

A shard is a safetensors file with one tensor, `tokens` (n,) of uint16 (vocabularies up to 65536) or uint32, and a text
header beside it. Documents follow each other, each ended by the end-of-document token; one may continue in the next
shard.

Sequence i of a shard is tokens[i*L : i*L + L + 1], inputs and the token after each: every token of a shard but its
first is a label once. The tokens after the last whole window of a shard, at most L, are not trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from config import json_text
from config.errors import UserError
from config.files import file_sha256, flush

FORMAT_VERSION = "1"
_DTYPE_NAMES = {"U16": "uint16", "U32": "uint32"}
_LARGEST_HEADER = 1 << 20
SHARDS_MAPPED = 1 << 14
"""Shards of a split mapped at a time, 10^12 tokens together. Linux allows a process 65,530 mappings (vm.max_map_count);
once they are used up, its next memory allocation fails."""


def token_dtype(vocab_size: int) -> str:
    """Smallest of uint16 and uint32 that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_shard(path: Path, tokens: np.ndarray, header: dict[str, str]) -> dict[str, Any]:
    """Write one shard to stable storage and return its entry for the index: file, bytes, tokens, header. tokens: (n,)
    uint16 or uint32. header: what to keep beside them; version, dtype and sha256 are added."""
    full = {
        **header,
        "format_version": FORMAT_VERSION,
        "dtype": tokens.dtype.name,
        "sha256": hashlib.sha256(np.ascontiguousarray(tokens).data).hexdigest(),
    }
    save_file({"tokens": tokens}, path, metadata=full)
    _sort_header(path)
    flush(path)
    return {"file": path.name, "bytes": path.stat().st_size, "tokens": len(tokens), "header": full}


def _sort_header(path: Path) -> None:
    """Sort a safetensors file's header, which the library writes in a different order in every process."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.dumps(json.loads(file.read(length)), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        file.seek(8)
        file.write(header.encode().ljust(length))  # the padding is spaces in any case


@dataclass(frozen=True)
class Shard:
    """One shard file, checked; its tokens are mapped on access."""

    path: Path
    tokens: int
    dtype: str
    offset: int
    """[bytes] Where the tokens start in the file."""

    @property
    def array(self) -> np.ndarray:
        """(tokens,) read-only view of the file, a new mapping each time."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.offset, shape=(self.tokens,))


def open_shard(path: Path, expected: dict[str, Any], *, verify: bool) -> Shard:
    """Open a shard. Raises UserError where size or header, or with `verify` the sha256, differ from the index."""
    try:
        header, base = header_of(path, expected["bytes"])
        tensor = header["tokens"]
        start, end = tensor["data_offsets"]
        shard = Shard(path, tensor["shape"][0], _DTYPE_NAMES[tensor["dtype"]], base + start)
        described = (header["__metadata__"], shard.tokens, shard.dtype, start, base + end)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise damaged(path, f"its header cannot be read: {type(error).__name__}") from error
    if described != (expected["header"], expected["tokens"], expected["header"]["dtype"], 0, expected["bytes"]):
        raise damaged(path, "its header is not the one in index.json")
    # read, not mapped: mapped pages count as memory of the process
    if verify and file_sha256(path, start=shard.offset) != expected["header"]["sha256"]:
        raise damaged(path, "its tokens do not have the sha256 in its header")
    return shard


def header_of(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """Header of a safetensors file of `size` bytes, and where its tensors begin."""
    if path.stat().st_size != size:
        raise damaged(path, f"it has {path.stat().st_size} bytes instead of {size}")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json_text.parse(file.read(min(length, _LARGEST_HEADER))), 8 + length


def damaged(path: Path, reason: str) -> UserError:
    """The error for prepared data that differs from what was written."""
    return UserError(f"{path}: damaged, {reason}. Delete the folder {path.parent} and start again to prepare it anew.")


class TokenShards:
    """The shards of one split, read as windows of a fixed length. Safe to read from several threads."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        self._ends: dict[int, np.ndarray] = {}
        self._array = lru_cache(SHARDS_MAPPED)(lambda number: self.shards[number].array)

    @property
    def tokens(self) -> int:
        """Tokens in all, ends of documents included."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def largest_id(self) -> int:
        """[id] The largest token, found by reading all of them; -1 for none."""
        return max((int(shard.array.max()) for shard in self.shards), default=-1)

    def sequences(self, sequence_length: int) -> int:
        """Number of windows of `sequence_length` tokens plus the next one."""
        return int(self._window_ends(sequence_length)[-1])

    def label_tokens(self, sequence_length: int) -> int:
        return self.sequences(sequence_length) * sequence_length

    def read(self, ids: np.ndarray, sequence_length: int) -> np.ndarray:
        """Windows number `ids`, (n,) int64 -> (n, sequence_length + 1) int64. Raises IndexError outside the range."""
        ends = self._window_ends(sequence_length)
        if len(ids) and (ids.min() < 0 or ids.max() >= ends[-1]):
            raise IndexError(f"windows {ids.min()} to {ids.max()} of {ends[-1]}")
        windows = np.empty((len(ids), sequence_length + 1), dtype=np.int64)
        owners = np.searchsorted(ends, ids, side="right") - 1
        for row, (number, owner) in enumerate(zip(ids, owners, strict=True)):
            first = int(number - ends[owner]) * sequence_length
            windows[row] = self._array(int(owner))[first : first + sequence_length + 1]
        return windows

    def _window_ends(self, sequence_length: int) -> np.ndarray:
        """(shards + 1,) int64: windows before each shard, and in all. Kept, since there may be thousands of shards."""
        if sequence_length not in self._ends:
            counts = [max(0, (shard.tokens - 1) // sequence_length) for shard in self.shards]
            self._ends[sequence_length] = np.cumsum([0, *counts], dtype=np.int64)
        return self._ends[sequence_length]
