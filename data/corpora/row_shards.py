"""Prepared rows on disk, read as sequences of whole rows.

A shard is a safetensors file of rows that follow each other: `tokens` (n,) uint16 or uint32, `trained` (n,) uint8,
`ends` (rows,) int64. A split's sequences are in one more file: `rows` (rows,) int64, the numbers of its rows in the
order of the sequences, `ends` (sequences,) int64, and for every row its number of tokens (`lengths`) and of labels
(`labels`), both (rows,) int32. All are memory-mapped, and their sizes and sha256 are in the corpus's index. A pair of
answers is a sequence of two rows, the chosen one first.

A row of n tokens takes n - 1 places of a sequence, because its last token is only a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors.numpy import save_file

from config.files import file_sha256, flush
from data.corpora.shards import TokenShards, damaged, header_of

_DTYPES = {"U8": "uint8", "U16": "uint16", "U32": "uint32", "I32": "int32", "I64": "int64", "F64": "float64"}


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Write a file to stable storage and return its entry for the index: file, bytes, sha256."""
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)
    flush(path)
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)}


def open_tensors(path: Path, expected: Mapping[str, Any], *, verify: bool) -> dict[str, np.ndarray]:
    """Read-only views of a file's tensors. Raises UserError where size, header or with `verify` the sha256 differ."""
    try:
        header, base = header_of(path, expected["bytes"])
        if verify and file_sha256(path) != expected["sha256"]:
            raise damaged(path, "it does not have the sha256 in index.json")
        return {name: _view(path, base, entry) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        raise damaged(path, f"it cannot be read: {type(error).__name__}") from error


def _view(path: Path, base: int, entry: Mapping[str, Any]) -> np.ndarray:
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    if not all(shape):
        return np.empty(shape, dtype=dtype)  # an empty file range cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r", offset=base + entry["data_offsets"][0], shape=shape)


class RowShards:
    """The rows of one split as sequences. Safe to read from several threads. Holds nothing of each row but what ranks
    share in mapped files."""

    _only_labels = 1
    """Tokens of each row that are no input."""

    def __init__(
        self, shards: Sequence[Mapping[str, np.ndarray]], order: Mapping[str, np.ndarray], *, sequence_length: int
    ) -> None:
        """shards: `open_tensors` of each. order: `open_tensors` of the file of sequences, made for this length."""
        self._shards, self.sequence_length = tuple(shards), sequence_length
        self._rows, self._ends = order["rows"], order["ends"]
        self._lengths, self._labels = order["lengths"], order["labels"]
        self.columns: dict[str, np.ndarray] = {}
        """Extra values of the sequences, (sequences, ...) each, measured by a task and read by its batches."""
        self._first = np.cumsum([0, *(len(shard["ends"]) for shard in shards)], dtype=np.int64)

    @classmethod
    def joined(cls, parts: Sequence[RowShards]) -> Self:
        """The sequences of several splits of one length and kind, one after another."""
        offsets = np.cumsum([0, *(part.rows for part in parts)])[:-1]
        order = {
            "rows": np.concatenate([part._rows + offset for part, offset in zip(parts, offsets, strict=True)]),
            "ends": np.concatenate([part._ends + offset for part, offset in zip(parts, offsets, strict=True)]),
            "lengths": np.concatenate([part._lengths for part in parts]),
            "labels": np.concatenate([part._labels for part in parts]),
        }
        shards = [shard for part in parts for shard in part._shards]
        return cls(shards, order, sequence_length=parts[0].sequence_length)

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def tokens(self) -> int:
        return int(self._lengths.sum(dtype=np.int64))

    @property
    def largest_id(self) -> int:
        """[id] The largest token, found by reading all of them; -1 for none."""
        return max((int(shard["tokens"].max(initial=0)) for shard in self._shards), default=-1)

    def sequences(self, sequence_length: int) -> int:
        """Number of sequences. Raises ValueError for any length other than the one they were made for."""
        if sequence_length != self.sequence_length:
            raise ValueError(f"sequences of {self.sequence_length} tokens, not {sequence_length}")
        return len(self._ends)

    def label_tokens(self, sequence_length: int) -> int:
        return int(self._labels.sum(dtype=np.int64))

    @property
    def inputs(self) -> int:
        """[tokens] Of all sequences, without padding."""
        return self.tokens - self._only_labels * self.rows

    def places(self, numbers: np.ndarray) -> np.ndarray:
        """(n,) int64: inputs of these sequences, without padding."""
        return self._sums(numbers, lambda rows: self._lengths[rows] - self._only_labels)

    @cached_property
    def longest(self) -> np.ndarray:
        """(sequences,) int32: inputs of the longest row of each sequence; for pairs, which have references each."""
        if not len(self._ends):
            return np.zeros(0, dtype=np.int32)
        starts = np.concatenate([[0], self._ends[:-1]])
        return np.asarray(np.maximum.reduceat(self._lengths[self._rows], starts) - self._only_labels)

    def labels(self, numbers: np.ndarray) -> np.ndarray:
        """(n,) int64: labels of these sequences."""
        return self._sums(numbers, lambda rows: self._labels[rows])

    def trained_rows(self, numbers: np.ndarray) -> np.ndarray:
        """(n,) int64: rows of each of these sequences that have a label."""
        return self._sums(numbers, lambda rows: self._labels[rows] > 0)

    def _sums(self, numbers: np.ndarray, of_rows: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """(n,) int64: for each of these sequences the sum of a number of its rows."""
        if not len(numbers):
            return np.zeros(0, dtype=np.int64)
        starts = np.where(numbers > 0, self._ends[numbers - 1], 0)
        counts = self._ends[numbers] - starts
        first = np.cumsum(counts) - counts
        rows = self._rows[np.arange(counts.sum()) + np.repeat(starts - first, counts)]
        return np.asarray(np.add.reduceat(of_rows(rows).astype(np.int64), first))

    def sequence(self, number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The rows of a sequence: (n,) tokens, and (n,) whether each is a label."""
        yield from map(self.row, self.rows_of(number))

    def rows_of(self, number: int) -> list[int]:
        """Numbers of a sequence's rows, in their order in the sequence."""
        found: list[int] = self._rows[self._ends[number - 1] if number else 0 : self._ends[number]].tolist()
        return found

    def row_places(self, number: int) -> np.ndarray:
        """(rows,) int64: inputs of each row of a sequence, in their order in the sequence."""
        return self._lengths[self.rows_of(number)].astype(np.int64) - 1

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """One row, in the order of the source."""
        shard, _, part = self.found(number)
        return shard["tokens"][part], shard["trained"][part]

    def found(self, number: int) -> tuple[Mapping[str, np.ndarray], int, slice]:
        """A row's shard, its index in the shard, and the slice of its tokens."""
        owner = int(np.searchsorted(self._first, number, side="right")) - 1
        shard, index = self._shards[owner], number - int(self._first[owner])
        return shard, index, slice(int(shard["ends"][index - 1]) if index else 0, int(shard["ends"][index]))


Split = TokenShards | RowShards
"""Training or validation data: documents cut into windows, or rows arranged into sequences."""
