"""Sources opened as streams, most of them by Hugging Face's `datasets`.

Importing `datasets` takes longer than opening a corpus that is prepared already, so `data.sources` imports this only
when a document is asked for.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import httpx
import pyarrow
import pyarrow.parquet

from config.errors import UserError
from config.files import temporary_folder, why_not_writable
from config.task import is_url
from data.sources.files import compression_of, decompressed, opened, pieces, unreadable
from data.sources.json_rows import json_rows
from data.sources.row_formats import BadRow, json_kind

if why_not_writable(Path(datasets.config.HF_DATASETS_CACHE)):
    # Nothing is kept there of a stream, but even one of local files makes the folder, for a lock.
    datasets.config.HF_DATASETS_CACHE = temporary_folder() / "datasets"

# A stream is read where it is opened: its epoch needs no shared memory, of which there may be none left.
iterable_dataset: Any = datasets.iterable_dataset
iterable_dataset._maybe_share_with_torch_persistent_workers = lambda value: value

for _builder in ("json", "parquet"):  # which log what they raise as well; `data.sources` says it in one line
    logging.getLogger(f"datasets.packaged_modules.{_builder}.{_builder}").setLevel(logging.CRITICAL)

READ_ERRORS = (
    *(datasets.exceptions.DatasetsError, pyarrow.ArrowException, httpx.HTTPError, ValueError, OSError),
    *(EOFError, zlib.error),  # of .gz, which `datasets` unpacks by Python's gzip
)
"""What opening and reading a stream raises when its files, its format or the network are at fault."""


def texts(paths: list[str], separator: str | None) -> datasets.IterableDataset:
    """One row a file, or a row for each piece between separators.

    A row is null where its bytes are not UTF-8, because one bad file must not end a corpus.
    """
    return datasets.IterableDataset.from_generator(_read_texts, gen_kwargs={"paths": paths, "separator": separator})


def files(builder: str, paths: list[str]) -> Iterable[dict[str, Any]]:
    """The rows of `json` or `parquet` files."""
    if builder == "json" and any(is_url(path) or compression_of(path) not in (None, "gzip") for path in paths):
        # `datasets` 5.2 reads compressed files of web servers only, and .zst with a package that it does not install
        return _json_files(paths)
    try:
        return datasets.load_dataset(builder, data_files=paths, split="train", streaming=True)
    except StopIteration:  # how `datasets` 5.2 says that no file has anything in it
        return []


def damage(builder: str, paths: list[str]) -> str | None:
    """In words, the first file of `files` that cannot be read, or its line; None where all can, or are behind a URL.

    Reads the files: for when it is known already that something is wrong, but not in which of them.
    """
    for path in () if any(map(is_url, paths)) else paths:
        try:
            if builder == "parquet":
                with pyarrow.parquet.ParquetFile(opened(path, seekable=True)) as file:
                    for _ in file.iter_batches():
                        pass
                continue
            for where, row in json_rows(path):
                if isinstance(row, BadRow):
                    return f"{where}: {row}; correct the row"
        except UserError as error:
            return str(error)
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            return str(unreadable(path, error))
    return None


def no_text(paths: list[str], field: str) -> str | None:
    """The first row of JSON files whose field holds something else than text or nothing: file, line and what it is."""
    for where, row in chain.from_iterable(map(json_rows, paths)):
        if not isinstance(row, BadRow) and not isinstance(row.get(field), str | None):
            return f"{where}: {field}: is {json_kind(row[field])}"
    return None


def folder(path: Path, name: str | None, split: str) -> datasets.IterableDataset:
    """A local copy of a hub dataset."""
    return datasets.load_dataset(str(path), name, split=split, streaming=True)


def saved(path: Path, split: str) -> datasets.IterableDataset:
    """A folder written by `Dataset.save_to_disk`. Raises ValueError: it has no such split."""
    found = datasets.load_from_disk(str(path))
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ValueError(f"no split {split!r}, its splits are {', '.join(found)}")
        found = found[split]
    return found.to_iterable_dataset()


def hub(repository: str, name: str | None, split: str, revision: str | None) -> tuple[datasets.IterableDataset, str]:
    """A dataset of the hub and the revision that was opened."""
    builder = datasets.load_dataset_builder(repository, name, revision=revision)
    return builder.as_streaming_dataset(split=split), builder.hash


def _read_texts(paths: list[str], separator: str | None) -> Iterator[dict[str, Any]]:
    for path in paths:
        try:
            with decompressed(path) as file:
                for raw in [file.read()] if separator is None else pieces(file, separator.encode()):
                    try:
                        yield {"text": raw.decode("utf-8")}
                    except UnicodeDecodeError:
                        yield {"text": None}
        except (OSError, pyarrow.ArrowException) as error:
            if is_url(path):
                raise
            raise unreadable(path, error) from error


def _json_files(paths: list[str]) -> Iterator[dict[str, Any]]:
    """Every row with the fields of those before it, null where it lacks one, as `datasets` has it on a disk."""
    fields: dict[str, None] = {}
    for path in paths:
        for where, row in json_rows(path):
            if isinstance(row, BadRow):
                raise ValueError(f"{where}: {row}")
            fields |= dict.fromkeys(row)
            yield {**fields, **row}
