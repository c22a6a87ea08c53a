"""Datasets of the hub and local copies of them, as streams by Hugging Face's `datasets`.

Importing `datasets` takes longer than opening a corpus that is prepared already, so `data.sources.sources` imports this
only when a row is asked for.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import datasets
import httpx
import pyarrow

READ_ERRORS = (
    *(datasets.exceptions.DatasetsError, pyarrow.ArrowException, httpx.HTTPError, ValueError, OSError),
    *(EOFError, zlib.error),  # of .gz, which `datasets` unpacks by Python's gzip
)
"""Errors that a stream raises when its files, its format or the network are at fault."""


def folder(path: Path, split: str, *, name: str | None) -> datasets.IterableDataset:
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
