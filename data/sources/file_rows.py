"""Rows of files, each with its file and its place there. Compressed text (.gz, .zst, .bz2) needs no unpacking.

Not read by `datasets`, which has no line numbers and gives every row of JSON the keys of all others.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, BinaryIO

import pyarrow.parquet

from config.errors import one_line
from data.sources.files import decompressed, opened, pieces, reading
from data.sources.row_formats import BadRow, Found

LONE_SURROGATE = "holds a lone surrogate, which is no character"
_ENCODING = "utf-8-sig"  # Windows writes a byte order mark
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PARQUET_ROWS = 256
"""Number of Parquet rows that exist as Python objects at a time."""


def text_rows(paths: Sequence[str], separator: str | None) -> Iterator[Found]:
    """{text} of each file, or of each piece between separators; null where bytes are not UTF-8. Raises UserError."""
    for path in paths:
        start = 0
        with reading(path), decompressed(path) as file:
            for raw in [file.read()] if separator is None else pieces(file, separator.encode()):
                where = path
                try:
                    text = raw.decode("utf-8")
                except UnicodeDecodeError as error:  # one bad file must not end a corpus
                    where, text = f"{path}: byte {start + error.start}", None
                if start == 0 and text:
                    text = text.removeprefix("\ufeff")  # Windows writes a byte order mark
                yield where, {"text": text}
                start += len(raw) + len((separator or "").encode())


def parquet_rows(path: str) -> Iterator[Found]:
    """The rows of a Parquet file by number. Raises UserError."""
    with reading(path), pyarrow.parquet.ParquetFile(opened(path, seekable=True)) as file:
        batches = (batch.to_pylist() for batch in file.iter_batches(_PARQUET_ROWS))
        for number, row in enumerate(chain.from_iterable(batches), 1):
            yield f"{path}: row {number}", row


def json_rows(path: str) -> Iterator[Found]:
    """The rows of a JSONL file by line, or of a JSON file that holds one list by item. Raises UserError."""
    with reading(path), decompressed(path) as stream:
        is_list = _opening(stream) == b"["
    with reading(path), decompressed(path) as stream:
        if is_list:
            raw = stream.read()
            escaped = _SURROGATE.search(raw) is not None  # once: for each row it would be quadratic
            for number, row in enumerate(json.loads(raw.decode(_ENCODING)), 1):
                yield f"{path}: item {number}", _as_row(row, escaped)
            return
        for number, line in enumerate(pieces(stream, b"\n"), 1):
            if line.removeprefix(codecs.BOM_UTF8).strip():
                yield f"{path}:{number}", _parsed(line)


def _opening(stream: BinaryIO) -> bytes:
    """The first byte that is neither white space nor part of a byte order mark."""
    while block := stream.read(4096):
        if start := block.removeprefix(codecs.BOM_UTF8).lstrip():
            return start[:1]
    return b""


def _parsed(line: bytes) -> dict[str, Any] | BadRow:
    try:
        return _as_row(json.loads(line.decode(_ENCODING)), _SURROGATE.search(line) is not None)
    except UnicodeDecodeError as error:
        return BadRow("", f"is not UTF-8 ({one_line(error, 120)}); save the file as UTF-8")
    except (ValueError, RecursionError) as error:
        part = isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc.rstrip()) - 1
        one = "; write each row on one line, or all rows in one list" if part else ""
        return BadRow("", f"is not JSON ({one_line(error, 120)}){one}")


def _as_row(value: Any, escaped: bool) -> dict[str, Any] | BadRow:
    """escaped: the bytes that `value` was parsed from hold the escape of a surrogate, as every lone one is."""
    if not isinstance(value, dict):
        return BadRow("", f"is {json.dumps(value)[:40]}, not an object with fields")
    if escaped:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return BadRow("", LONE_SURROGATE)
    return value
