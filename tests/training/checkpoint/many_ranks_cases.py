"""Code run inside the processes of test_many_ranks.py."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.models.small_run import engine_of, resolve, restored
from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.manifest import Written, layout_of
from training.checkpoint.outcome import SaveFailed
from training.checkpoint.retention import Retention
from training.checkpoint.save import agree_on_files
from training.distributed import World


class _Touched:
    """Counts, for the whole process, how often files in a folder are looked for, listed or opened by Python."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self.found = Counter[tuple[str, str]]()
        sys.addaudithook(lambda event, given: self.note(event, given[0]) if event in _EVENTS else None)
        stat = os.stat

        def noted(path: Any, **options: Any) -> os.stat_result:
            self.note("stat", path)
            return stat(path, **options)

        os.stat = noted  # type: ignore[assignment]

    def note(self, event: str, path: Any) -> None:
        if self._folder is not None and isinstance(path, str | Path) and Path(path).is_relative_to(self._folder):
            self.found[event, Path(path).relative_to(self._folder).as_posix()] += 1

    @contextmanager
    def within(self, folder: Path) -> Iterator[Counter[tuple[str, str]]]:
        """The events of this block, by kind and path from `folder`."""
        self._folder, self.found = folder, Counter()
        try:
            yield self.found
        finally:
            self._folder = None


_EVENTS = ("open", "os.listdir", "os.scandir")


@cache
def _touched() -> _Touched:
    return _Touched()  # an audit hook stays


def resumed(world: World, *, folder: str, stage: int) -> dict[str, Counter[tuple[str, str]]]:
    """The files of its checkpoint that a rank touches while it is chosen, and while it is loaded."""
    with engine_of(world, resolve(world, stage=stage, compute="bf16")) as engine:
        checkpoints = Checkpoints(Path(folder), keep=Retention(2), identity={"stage": stage}, world=world)
        with _touched().within(Path(folder) / "step-1") as choosing:
            path = checkpoints.find("auto")
        with _touched().within(Path(folder) / "step-1") as loading:
            progress = restored(checkpoints, path, engine)
        assert progress.step == 1
    return {"choosing": choosing, "loading": loading}


def agreed(world: World, *, broken: bool) -> Any:
    """The files and layouts of ranks of which each has one tensor table of its own, and one that all have."""
    tables = {layout_of(table): table for table in ({"a": ("float32", [world.rank])}, {"b": ("int64", [])})}
    written = {f"{number}-{world.rank}.pt": Written("0", 1, world.rank, layout) for number, layout in enumerate(tables)}
    error = "rank 1 cannot write" if broken and world.rank == 1 else None
    files: Any = SimpleNamespace(written=written, layouts=tables, error=error, finite=True)
    try:
        return agree_on_files(world.on_own_group(), files, Path("step-1"))
    except SaveFailed as failure:
        return str(failure)
