"""Publishing a checkpoint: written to a hidden folder, flushed, renamed once; a kill leaves no half-written one.

    .step-60.partial     being written; names with a dot are never chosen
    .step-60.replaced    the old step-60 while a new one takes its name
    .step-60.dropped     being deleted
    step-60.damaged      set aside: it differs from what was written

After a kill `recover` finishes or undoes what was in progress. Only the main process calls these.
"""

import contextlib
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from config.files import file_sha256, flush, write_flushed
from config.json_text import sealed
from training.checkpoint.manifest import MANIFEST, Written, is_whole
from training.checkpoint.retention import is_read_locked

Reached = Callable[[str], None]


def partial_of(final: Path) -> Path:
    """The folder in which a checkpoint is written."""
    return final.with_name(f".{final.name}.partial")


def begin(final: Path) -> None:
    """Create an empty folder to write a checkpoint into. Raises OSError."""
    partial = partial_of(final)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def add_unlisted_files(partial: Path, files: dict[str, Written]) -> None:
    """Flush and list files not written by `Files`: DeepSpeed's copies of what it offloaded to NVMe. Raises OSError."""
    for path in sorted(path for path in partial.rglob("*") if path.is_file()):
        name = path.relative_to(partial).as_posix()
        if name not in files:
            flush(path)
            files[name] = Written(file_sha256(path), path.stat().st_size, 0)


def seal_folder(partial: Path, manifest: dict[str, Any], reached: Reached = lambda phase: None) -> int:
    """Write the manifest of files already on disk, and flush the folders; returns the manifest's size in bytes."""
    reached("manifest")
    text = sealed(manifest).encode()
    write_flushed(partial / MANIFEST, text)
    for folder in [*(path for path in partial.rglob("*") if path.is_dir()), partial]:
        flush(folder)
    reached("sealed")
    return len(text)


def publish(partial: Path, final: Path, reached: Reached = lambda phase: None) -> None:
    """Rename the sealed folder to `final`, then point LATEST to it. Raises OSError; an older `final` then stays."""
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        final.rename(replaced)
        reached("replacing")
    try:
        partial.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    reached("renamed")
    flush(final.parent)
    name_latest(final, reached)
    shutil.rmtree(replaced, ignore_errors=True)


def name_latest(final: Path, reached: Reached = lambda phase: None) -> None:
    """Point LATEST to `final`, atomically. Raises OSError."""
    partial = final.with_name(".LATEST.partial")
    write_flushed(partial, f"{final.name}\n".encode())
    reached("latest")
    partial.replace(final.with_name("LATEST"))
    flush(final.parent)
    reached("named")


def drop(path: Path, reached: Reached = lambda phase: None) -> None:
    """Delete a checkpoint, renamed first so that it never appears half deleted. One locked for reading stays."""
    if is_read_locked(path):
        return
    hidden = path.with_name(f".{path.name}.dropped")
    try:
        path.rename(hidden)
    except OSError:
        return
    reached("dropping")
    shutil.rmtree(hidden, ignore_errors=True)


def rename_damaged(path: Path) -> Path | None:
    """Rename a damaged checkpoint so that it is never chosen again; returns its new path, or None on failure."""
    targets = (path.with_name(f"{path.name}.damaged" + (f".{number}" if number else "")) for number in count())
    target = next(target for target in targets if not target.exists())
    with contextlib.suppress(OSError):
        return path.rename(target)
    return None


def recover(folder: Path) -> None:
    """Finish or undo what a killed process had in progress. Does nothing in a folder that cannot be written."""
    for replaced in folder.glob(".step-*.replaced"):
        name = replaced.name[1:].removesuffix(".replaced")
        final, partial = folder / name, folder / f".{name}.partial"
        if not final.exists():  # killed between the two renames; the new one had been flushed and sealed
            with contextlib.suppress(OSError):
                (partial if is_whole(partial) else replaced).rename(final)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
    for pattern in (".step-*.partial", ".step-*.dropped"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)
    for leftover in (*folder.glob(".LATEST.partial"), *folder.glob(".RUN.*.partial")):
        with contextlib.suppress(OSError):
            leftover.unlink(missing_ok=True)
