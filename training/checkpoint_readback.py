"""Read a checkpoint back from disk while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from training.checkpoint_manifest import Written, file_sha256


class ReadBack:
    """Hashes the files that this rank wrote, in a thread; hashing leaves the interpreter to the training loop."""

    def __init__(self, path: Path, *, rank: int, files: Mapping[str, Written]) -> None:
        """path: the published checkpoint. files: what was written, by path inside it."""
        self._path = path
        self._mine = {name: file.sha256 for name, file in files.items() if file.rank == rank}
        self._problem: str | None = None
        self._read = 0
        self._thread = threading.Thread(target=self._hash, name="checkpoint read-back", daemon=True)
        self._thread.start()

    def wait(self) -> tuple[Path, str | None, int]:
        """The checkpoint, what is wrong with it (None: nothing), and the bytes that were read."""
        self._thread.join()
        return self._path, self._problem, self._read

    def _hash(self) -> None:
        for name, expected in self._mine.items():
            try:
                found = file_sha256(self._path / name)
                self._read += (self._path / name).stat().st_size
            except OSError as error:
                self._problem = f"{name} cannot be read back: {error.strerror or error}"
                return
            if found != expected:
                self._problem = f"{name} was written with SHA-256 {expected[:12]}... and reads {found[:12]}..."
                return
