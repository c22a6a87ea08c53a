"""Tokenized documents as Megatron-LM's preprocessing writes them: a `.bin` of token ids and its index `.idx`.

The format is that of `megatron/core/datasets/indexed_dataset.py` (IndexedDataset, "MMIDIDX"), little-endian:

| bytes | of the index |
|---|---|
| 9 | `MMIDIDX` and two zeros |
| 8 | version, 1 |
| 1 | dtype of the ids, see `_DTYPES` |
| 8, 8 | number of sequences n, number of document borders d |
| 4 n | int32: tokens of each sequence |
| 8 n | int64: where each begins in the `.bin` [bytes] |
| 8 d | int64: sequences before each document and after the last: 0, ..., n |

A document may be several sequences (one for each sentence). Multimodal sets have n further bytes, and are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from config.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Integer dtypes by Megatron's code, which hold ids; 6 and 7 are floating-point."""
_CHECKED_AT_ONCE = 1 << 20
"""Sequences of which a copy is held while an index is checked: it may be larger than the memory."""


@dataclass(frozen=True)
class _Index:
    """The arrays of an index, memory-mapped and checked."""

    dtype: np.dtype
    lengths: np.ndarray
    """(sequences,) int32 [tokens]"""
    pointers: np.ndarray
    """(sequences,) int64 [bytes]"""
    borders: np.ndarray
    """(documents + 1,) int64 [sequences]"""
    bin_bytes: int
    """[bytes] Size of the .bin."""


def bin_of(index: Path) -> Path:
    """The tokens beside an index."""
    return index.with_suffix(".bin")


def documents(index: Path) -> Iterator[np.ndarray]:
    """The ids of every document, (tokens,) of the file's integer dtype, read when they are used. Raises UserError."""
    found = _read_index(index)
    size = found.dtype.itemsize
    shape = (found.bin_bytes // size,)
    ids = np.memmap(bin_of(index), found.dtype, mode="r", shape=shape) if shape[0] else np.empty(0, found.dtype)
    for first, last in zip(found.borders, found.borders[1:], strict=False):
        starts, lengths = found.pointers[first:last] // size, found.lengths[first:last]
        parts = [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        yield parts[0] if len(parts) == 1 else np.concatenate([ids[:0], *parts])


def _read_index(path: Path) -> _Index:
    tokens = bin_of(path)
    try:
        size, bin_bytes = path.stat().st_size, tokens.stat().st_size
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
    except OSError as error:
        raise UserError(
            f"{error.filename}: cannot be read ({error.strerror}). data.source=megatron needs a .bin beside each .idx."
        ) from error
    if not header.startswith(_MAGIC[: len(header)]) or not header:
        raise _unusable(path, "it does not begin with MMIDIDX")
    if len(header) < _HEADER.size:
        raise _unusable(path, f"it has {size} bytes, fewer than its header")
    _, version, code, sequences, borders = _HEADER.unpack(header)
    if version != 1:
        raise _unusable(path, f"its version is {version}, not 1")
    if code not in _DTYPES:
        raise _unusable(path, f"its dtype has the code {code}, which is not an integer type")
    expected = _HEADER.size + 12 * sequences + 8 * borders
    if size != expected:
        multimodal = " and is multimodal" if size == expected + sequences else ""
        raise _unusable(path, f"it has {size} bytes instead of {expected}{multimodal}")
    index = _Index(
        dtype=np.dtype(_DTYPES[code]),
        lengths=_mapped(path, "<i4", _HEADER.size, sequences),
        pointers=_mapped(path, "<i8", _HEADER.size + 4 * sequences, sequences),
        borders=_mapped(path, "<i8", _HEADER.size + 12 * sequences, borders),
        bin_bytes=bin_bytes,
    )
    _check(path, index)
    return index


def _mapped(path: Path, dtype: str, offset: int, count: int) -> np.ndarray:
    return np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)) if count else np.empty(0, dtype)


def _check(path: Path, index: _Index) -> None:
    """Raises UserError unless every document is whole sequences that lie in the .bin, and these are all of it."""
    size, end = index.dtype.itemsize, 0
    for start in range(0, len(index.lengths), _CHECKED_AT_ONCE):
        lengths = index.lengths[start : start + _CHECKED_AT_ONCE].astype(np.int64)
        pointers = index.pointers[start : start + _CHECKED_AT_ONCE]
        if lengths.min() < 0 or pointers.min() < 0 or (pointers % size).any():
            raise _unusable(path, f"a sequence from number {start} on has an impossible length or position")
        end = max(end, int((pointers + lengths * size).max()))
    if end != index.bin_bytes:
        raise _unusable(bin_of(path), f"it has {index.bin_bytes} bytes, and {path.name} ends at {end}")
    borders = index.borders
    if not len(borders) or borders[0] != 0 or borders[-1] != len(index.lengths):
        raise _unusable(path, f"its documents do not cover all its {len(index.lengths)} sequences")
    for start in range(0, len(borders), _CHECKED_AT_ONCE):
        if (np.diff(borders[start : start + _CHECKED_AT_ONCE + 1]) < 0).any():
            raise _unusable(path, "its documents are not in order")


def _unusable(path: Path, reason: str) -> UserError:
    return UserError(f"{path}: is damaged or not in Megatron's indexed format: {reason}. Copy or create it again.")
