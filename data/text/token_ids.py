"""Documents that are token ids already: checked against the vocabulary, ended, and split into training and validation.

A document's ids come as they are; only the end of a document is added where its last id is another. The validation set
is drawn by a hash of the ids without that end, so it is not the one that the same text would have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from config.errors import UserError
from config.schema import DataSection
from data.sources.files import opened, unreadable
from data.sources.row_formats import BadRow
from data.sources.sources import Source
from data.text.encode import Encoded, is_drawn

_BATCH_TOKENS = 1 << 20

Found = tuple[str, Any]
"""The place of a document, and the value of its field."""


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary that ids are checked against, and the dtype that they are stored in."""

    tokenizer: str
    """data.tokenizer"""
    size: int
    """[ids]"""
    end_of_document: int
    dtype: str
    """uint16 or uint32"""


def copied(
    data: DataSection, source: Source, vocabulary: Vocabulary, skipped: Counter[str]
) -> Generator[tuple[Encoded, Encoded]]:
    """The documents of a source with `ids_field` in batches: (training, validation). Raises UserError."""
    assert source.ids_field is not None
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    end, held = np.array([vocabulary.end_of_document], dtype=vocabulary.dtype), 0
    for where, value in _located(data, source, source.ids_field):
        ids = _ids(where, value, source.ids_field, vocabulary)
        if len(ids) and ids[-1] == vocabulary.end_of_document:
            ids = ids[:-1]
        if not len(ids):
            skipped["no tokens"] += 1
            continue
        held_out = is_drawn(ids.astype("<u4").tobytes(), data.validation_fraction)
        parts[held_out].append(np.concatenate([ids.astype(vocabulary.dtype), end]))
        held += len(ids) + 1
        if held >= _BATCH_TOKENS:
            yield _encoded(parts[0], vocabulary.dtype), _encoded(parts[1], vocabulary.dtype)
            parts, held = ([], []), 0
    yield _encoded(parts[0], vocabulary.dtype), _encoded(parts[1], vocabulary.dtype)


def _encoded(documents: list[np.ndarray], dtype: str) -> Encoded:
    return Encoded(np.concatenate([np.empty(0, dtype=dtype), *documents]), len(documents), text_bytes=0)


def _ids(where: str, value: Any, field: str, vocabulary: Vocabulary) -> np.ndarray:
    """(tokens,) of an integer dtype, each in the vocabulary. Raises UserError."""
    try:
        ids = np.asarray([] if value is None else value)
    except ValueError:  # lists of several lengths
        ids = np.asarray(None)
    if ids.ndim == 1 and not len(ids):
        return np.empty(0, dtype=vocabulary.dtype)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UserError(
            f"{where}: {field}: is not a list of whole numbers. Name the field with token ids in data.input_ids_field."
        )
    if ids.min() < 0 or ids.max() >= vocabulary.size:
        position = int(np.flatnonzero((ids < 0) | (ids >= vocabulary.size))[0])
        raise UserError(
            f"{where}: {field}[{position}]: is {ids[position]}, and the ids of data.tokenizer={vocabulary.tokenizer} "
            f"are 0 to {vocabulary.size - 1}. Name the tokenizer that made them."
        )
    return ids


def _located(data: DataSection, source: Source, field: str) -> Iterator[Found]:
    """The field's value in every row, with its file and place there as far as a hub gives them."""
    if data.source == "parquet":
        for path in source.files:
            yield from _of_parquet(path, field)
    else:
        for where, row in source.rows():
            if isinstance(row, BadRow):
                raise UserError(f"{where}: {row}; correct the row") from row
            if field not in row:
                raise _no_such_field(where, field, row)
            yield where, row[field]


def _of_parquet(path: str, field: str) -> Iterator[Found]:
    """Rows of one column, as views of its buffer: Python's numbers take ten times as long."""
    try:
        with pyarrow.parquet.ParquetFile(opened(path, seekable=True)) as file:
            if field not in file.schema_arrow.names:
                raise _no_such_field(path, field, file.schema_arrow.names)
            number = 0
            for batch in file.iter_batches(columns=[field]):
                column = batch.column(0)
                if pyarrow.types.is_fixed_size_list(column.type):
                    column = column.cast(pyarrow.list_(column.type.value_type))
                if not (pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)):
                    raise UserError(f"{path}: {field}: holds {column.type}, not lists. Set data.input_ids_field.")
                values, there = (part.to_numpy(zero_copy_only=False) for part in (column.values, column.is_valid()))
                offsets = column.offsets.to_numpy()
                for present, start, stop in zip(there, offsets[:-1], offsets[1:], strict=True):
                    number += 1
                    yield f"{path}: row {number}", values[start:stop] if present else None
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise unreadable(path, error) from error


def _no_such_field(where: str, field: str, fields: Any) -> UserError:
    return UserError(
        f"data.input_ids_field={field}: not a field of {where}; its fields are {', '.join(sorted(fields))}. "
        "Set data.input_ids_field to the one that holds the token ids."
    )
