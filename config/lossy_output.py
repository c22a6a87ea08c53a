"""Standard output and error whose text is dropped where it cannot be written, instead of ending the process.

A run's log is often a file on a disk that may fill, or a pipe whose reader may leave. Neither is worth a run.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def outlive_full_disk() -> None:
    """From now on what this process prints may get lost, and no print raises OSError."""
    sys.stdout, sys.stderr = _lossy(sys.stdout), _lossy(sys.stderr)


def _lossy(stream: Any) -> Any:
    try:
        stream.flush()
        file = _LossyFile(stream.fileno())
    except (AttributeError, OSError, ValueError):  # not a file of the operating system
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(file), encoding=stream.encoding, errors=stream.errors, line_buffering=True
    )


class _LossyFile(io.RawIOBase):
    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError:
            return memoryview(data).nbytes

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)
