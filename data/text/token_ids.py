"""Documents that are already token ids: checked against the vocabulary, ended, and split into training and validation.

A document's ids are used as they are; an end-of-document token is added only if the last id is another one. The
validation set is drawn by a hash of the ids without that end, so it differs from that of the same text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from config.errors import UserError
from config.schema import DataSection
from data.sources.files import opened, reading
from data.sources.row_formats import BadRow
from data.sources.sources import Source
from data.text.encode import is_validation, joined_splits

_BATCH_TOKENS = 1 << 20


def copied(
    data: DataSection, source: Source, skipped: Counter[str], *, size: int, end_of_document: int, dtype: str
) -> Generator[dict[str, np.ndarray]]:
    """The documents of a source with `ids_field` in batches, as in `joined_splits`. Raises UserError. size: [ids] of
    the vocabulary. dtype: of the stored ids, uint16 or uint32."""
    assert source.ids_field is not None
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    counts, held = np.zeros((2, 2), dtype=np.int64), 0
    end = np.array([end_of_document], dtype=dtype)
    for where, value in _located(data, source, source.ids_field):
        ids = _ids(f"{where}: {source.ids_field}", value, size, data.tokenizer)
        if len(ids) and ids[-1] == end_of_document:
            ids = ids[:-1]
        if not len(ids):
            skipped["no tokens"] += 1
            continue
        held_out = is_validation(ids.astype("<u4").tobytes(), data.validation_fraction)
        parts[held_out].append(np.concatenate([ids.astype(dtype), end]))
        counts[int(held_out), 0] += 1
        held += len(ids) + 1
        if held >= _BATCH_TOKENS:
            yield joined_splits(parts, counts, end.dtype)
            parts, counts, held = ([], []), np.zeros_like(counts), 0
    yield joined_splits(parts, counts, end.dtype)


def _ids(where: str, value: Any, size: int, tokenizer: str) -> np.ndarray:
    """(tokens,) of an integer dtype, each below `size`. where: place and field, for messages. Raises UserError."""
    try:
        ids = np.asarray([] if value is None else value)
    except ValueError:  # lists of different lengths
        ids = np.asarray(None)
    if ids.ndim == 1 and not len(ids):
        return ids.astype(np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UserError(
            f"{where}: is not a list of whole numbers. Name the field with token ids in data.input_ids_field."
        )
    if ids.min() < 0 or ids.max() >= size:
        position = int(np.flatnonzero((ids < 0) | (ids >= size))[0])
        raise UserError(
            f"{where}[{position}]: is {ids[position]}, and the ids of data.tokenizer={tokenizer} "
            f"are 0 to {size - 1}. Name the tokenizer that made them."
        )
    return ids


def _located(data: DataSection, source: Source, field: str) -> Iterator[tuple[str, Any]]:
    """The field's value in every row, with its file and place if the source has them."""
    if data.source == "parquet":
        for path in source.files:
            yield from _of_parquet(path, field)
        return
    for where, row in source.rows():
        if isinstance(row, BadRow):
            raise UserError(f"{where}: {row}; correct the row") from row
        if field not in row:
            raise _no_such_field(where, field, row)
        yield where, row[field]


def _of_parquet(path: str, field: str) -> Iterator[tuple[str, Any]]:
    """Rows of one column as arrays: Python numbers take ten times as long."""
    with reading(path), pyarrow.parquet.ParquetFile(opened(path, seekable=True)) as file:
        if field not in file.schema_arrow.names:
            raise _no_such_field(path, field, file.schema_arrow.names)
        columns = (batch.column(0) for batch in file.iter_batches(columns=[field]))
        for number, value in enumerate(chain.from_iterable(columns), 1):
            if not isinstance(value, pyarrow.ListScalar):
                raise UserError(f"{path}: {field}: holds {value.type}, not lists. Set data.input_ids_field.")
            yield f"{path}: row {number}", value.values.to_numpy(zero_copy_only=False) if value.is_valid else None


def _no_such_field(where: str, field: str, fields: Any) -> UserError:
    return UserError(
        f"data.input_ids_field={field}: not a field of {where}; its fields are {', '.join(sorted(fields))}. "
        "Set data.input_ids_field to the one that holds the token ids."
    )
