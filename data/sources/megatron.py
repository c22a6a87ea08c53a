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

A document may be several sequences (one for each sentence). Multimodal sets have n more bytes, and are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from config.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Integer dtypes of ids by Megatron's code; 6 and 7 are floating-point."""
_CHECKED_AT_ONCE = 1 << 20
"""Number of sequences copied at a time while an index is checked, which may be larger than memory."""


def bin_of(index: Path) -> Path:
    """The `.bin` file of token ids beside an index."""
    return index.with_suffix(".bin")


def documents(index: Path) -> Iterator[np.ndarray]:
    """The ids of every document, (tokens,) in the file's integer dtype, read lazily. Raises UserError."""
    dtype, lengths, pointers, borders = _read_index(index)
    tokens = bin_of(index)
    ids = np.memmap(tokens, dtype, mode="r") if tokens.stat().st_size else np.empty(0, dtype)
    for first, last in zip(borders, borders[1:], strict=False):
        starts = pointers[first:last] // dtype.itemsize
        parts = [ids[start : start + length] for start, length in zip(starts, lengths[first:last], strict=True)]
        yield parts[0] if len(parts) == 1 else np.concatenate([ids[:0], *parts])


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """The dtype of the ids, and checked memory maps: lengths [tokens], pointers [bytes] and borders [sequences]."""
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
    _, version, code, sequences, borders_count = _HEADER.unpack(header)
    if version != 1:
        raise _unusable(path, f"its version is {version}, not 1")
    if code not in _DTYPES:
        raise _unusable(path, f"its dtype has the code {code}, which is not an integer type")
    expected = _HEADER.size + 12 * sequences + 8 * borders_count
    if size != expected:
        multimodal = " and is multimodal" if size == expected + sequences else ""
        raise _unusable(path, f"it has {size} bytes instead of {expected}{multimodal}")
    dtype = np.dtype(_DTYPES[code])
    lengths = _mapped(path, "<i4", _HEADER.size, sequences)
    pointers = _mapped(path, "<i8", _HEADER.size + 4 * sequences, sequences)
    borders = _mapped(path, "<i8", _HEADER.size + 12 * sequences, borders_count)
    end = _end_of_sequences(path, lengths, pointers, dtype.itemsize)
    if end != bin_bytes:
        raise _unusable(tokens, f"it has {bin_bytes} bytes, and {path.name} ends at {end}")
    if not len(borders) or borders[0] != 0 or borders[-1] != sequences:
        raise _unusable(path, f"its documents do not cover all its {sequences} sequences")
    for start in range(0, len(borders), _CHECKED_AT_ONCE):
        if (np.diff(borders[start : start + _CHECKED_AT_ONCE + 1]) < 0).any():
            raise _unusable(path, "its documents are not in order")
    return dtype, lengths, pointers, borders


def _mapped(path: Path, dtype: str, offset: int, count: int) -> np.ndarray:
    return np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)) if count else np.empty(0, dtype)


def _end_of_sequences(path: Path, lengths: np.ndarray, pointers: np.ndarray, size: int) -> int:
    """[bytes] End of the last sequence. Raises UserError for an impossible length or position. size: [bytes] per id."""
    end = 0
    for start in range(0, len(lengths), _CHECKED_AT_ONCE):
        tokens = lengths[start : start + _CHECKED_AT_ONCE].astype(np.int64)
        places = pointers[start : start + _CHECKED_AT_ONCE]
        if tokens.min() < 0 or places.min() < 0 or (places % size).any():
            raise _unusable(path, f"a sequence from number {start} on has an impossible length or position")
        end = max(end, int((places + tokens * size).max()))
    return end


def _unusable(path: Path, reason: str) -> UserError:
    return UserError(f"{path}: is damaged or not in Megatron's indexed format: {reason}. Copy or create it again.")
