"""Files of a source, on a disk or behind a URL: opened, decompressed, and cut at a separator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

import pyarrow

from config.errors import Unreadable, UserError, one_line
from config.task import COMPRESSIONS, is_url

BLOCK_BYTES = 1 << 20
"""[bytes] Block size for reading a file that is split at separators."""


def opened(path: str, *, seekable: bool = False) -> BinaryIO:
    """A file or URL for reading. seekable: it is read in parts, which not every server supports."""
    if not is_url(path):
        return Path(path).open("rb")
    from data.sources import remote  # it loads fsspec

    return remote.opened(path, seekable=seekable)


def compression_of(path: str) -> str | None:
    """The compression of a file or URL, by its name; None if uncompressed."""
    return COMPRESSIONS.get(PurePosixPath(path.partition("?")[0] if is_url(path) else path).suffix)


def decompressed(path: str) -> BinaryIO:
    """A file or URL for reading from its start, decompressed."""
    return cast(BinaryIO, pyarrow.input_stream(opened(path), compression=compression_of(path)))


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Context manager: a damaged file, one of another format, or a failing store raises Unreadable. The libraries
    under fsspec have their own exceptions, and none of them has to be installed."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise Unreadable(
            f"{path}: cannot be read ({one_line(error)}). Check that it is whole, and its format."
        ) from error


def pieces(file: BinaryIO, separator: bytes) -> Iterator[bytes]:
    """The parts that `bytes.split` would give, holding one block and copies of the longest part in memory."""
    held = bytearray()
    while block := file.read(BLOCK_BYTES):
        start = max(0, len(held) - len(separator) + 1)  # a separator cut by the block border may begin here
        held += block
        done = 0
        while (end := held.find(separator, max(start, done))) >= 0:
            yield bytes(held[done:end])
            done = end + len(separator)
        del held[:done]
    yield bytes(held)
