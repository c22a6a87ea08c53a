"""Datasets of the hub and local copies of them, streamed by Hugging Face's `datasets`.

Importing `datasets` takes longer than opening a corpus that is prepared already, so `data.sources.sources` imports this
only when a row is asked for.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import datasets
import httpx
import pyarrow

from config.schema import DataSection

READ_ERRORS = (
    *(datasets.exceptions.DatasetsError, pyarrow.ArrowException, httpx.HTTPError, ValueError, OSError),
    *(EOFError, zlib.error),  # for .gz, which `datasets` unpacks with Python's gzip
)
"""Errors that a stream raises if its files, its format or the network are at fault."""


def opened(data: DataSection) -> tuple[datasets.IterableDataset, str | None]:
    """The rows of data.path, and the revision of a hub dataset. Raises READ_ERRORS, also while rows are read."""
    folder = Path(str(data.path)).expanduser()
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        found = datasets.load_from_disk(str(folder))
        if isinstance(found, datasets.DatasetDict):
            if data.split not in found:
                raise ValueError(f"no split {data.split!r}, its splits are {', '.join(found)}")
            found = found[data.split]
        return found.to_iterable_dataset(), None
    if folder.is_dir():
        return datasets.load_dataset(str(folder), data.name, split=data.split, streaming=True), None
    repository, _, pinned = str(data.path).partition("@")
    builder = datasets.load_dataset_builder(repository, data.name, revision=pinned or None)
    return builder.as_streaming_dataset(split=data.split), builder.hash
