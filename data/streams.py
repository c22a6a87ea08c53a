"""Sources opened as Hugging Face `datasets` streams.

Importing `datasets` takes longer than opening a corpus that is prepared already, so `data.sources` imports this only
when a document is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import httpx
import pyarrow

from config.files import temporary_folder, why_not_writable

if why_not_writable(Path(datasets.config.HF_DATASETS_CACHE)):
    # Nothing is kept there of a stream, but even one of local files makes the folder, for a lock.
    datasets.config.HF_DATASETS_CACHE = temporary_folder() / "datasets"

BLOCK_BYTES = 1 << 20
"""[bytes] A file that is split into documents is read in blocks of so many."""
READ_ERRORS = (datasets.exceptions.DatasetsError, pyarrow.ArrowException, httpx.HTTPError, ValueError, OSError)
"""What opening and reading a stream raises when its files, its format or the network are at fault."""


def texts(paths: list[str], separator: str | None) -> datasets.IterableDataset:
    """One row a file, or a row for each piece between separators.

    A row is null where its bytes are not UTF-8, because one bad file must not end a corpus.
    """
    return datasets.IterableDataset.from_generator(_read_texts, gen_kwargs={"paths": paths, "separator": separator})


def files(builder: str, paths: list[str]) -> datasets.IterableDataset:
    """The rows of `json` or `parquet` files."""
    return datasets.load_dataset(builder, data_files=paths, split="train", streaming=True)


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
        with Path(path).open("rb") as file:
            for raw in [file.read()] if separator is None else pieces(file, separator.encode()):
                try:
                    yield {"text": raw.decode("utf-8")}
                except UnicodeDecodeError:
                    yield {"text": None}


def pieces(file: BinaryIO, separator: bytes) -> Iterator[bytes]:
    """What `bytes.split` makes of a file, with a block and copies of the longest piece in memory.

    A separator that is UTF-8 cuts no character of a text that is: no character's bytes are inside another's.
    """
    held = bytearray()
    while block := file.read(BLOCK_BYTES):
        start = max(0, len(held) - len(separator) + 1)  # where one may begin that was not whole before
        held += block
        done = 0
        while (end := held.find(separator, max(start, done))) >= 0:
            yield bytes(held[done:end])
            done = end + len(separator)
        del held[:done]
    yield bytes(held)
