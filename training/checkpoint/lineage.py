"""The run behind this session's checkpoints, and whether it went back to an older one. For the main process only."""

import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from training.checkpoint.choice import orders_in
from training.checkpoint.manifest import read_manifest
from training.checkpoint.run_record import Order, Record, order_in, read_record, run_in


class Lineage:
    """The run's identity, which every manifest of a session seals, and the file RUN beside the checkpoints."""

    def __init__(self, folder: Path, name: str) -> None:
        """folder: the checkpoints folder, with or without RUN yet. name: the run's, for messages."""
        self._folder = folder
        self._run = Record(uuid.uuid4().hex[:16], name)
        self._went_back = 0
        self._in_folder = False

    def continue_from(self, path: Path, in_store: Sequence[Order], *, record: bool) -> None:
        """Continue the run from `path`: checkpoints that counted as newer no longer do.

        in_store: the checkpoints in the object store. record: write it to RUN too, so that it holds even if the run
        ends before its next save. Raises OSError when that cannot be written.
        """
        manifest, found = read_manifest(path), read_record(self._folder)
        own = path.resolve().parent == self._folder.resolve()
        order = order_in(manifest) if own else (0, -1)
        run = run_in(manifest) if own else None
        self._run = found or (Record(*run) if run else self._run)
        others = [*orders_in(self._folder), *in_store]
        ahead = [other for other in others if other > order and not self._run.left(other)]
        goes_back = bool(ahead) or self._run.left(order)
        before = max([order[0], self._run.went_back, *(other[0] for other in ahead)])
        self._went_back = before + goes_back
        if goes_back and record:
            self._run = replace(self._run, went_back=self._went_back, back_to=order[1])
            self._run.write(self._folder)

    def begin_save(self) -> None:
        """Write RUN before a checkpoint, so that none is published in a folder without it. Raises OSError."""
        if self._in_folder:
            return
        found = read_record(self._folder)
        self._run = found or self._run
        if found is None:
            self._run.write(self._folder)
        self._in_folder = True

    def fields(self) -> dict[str, Any]:
        """The fields for the manifest."""
        return {"run": {"id": self._run.id, "name": self._run.name}, "went_back": self._went_back}
