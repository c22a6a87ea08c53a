"""`manifest.json`: the files of a checkpoint with sizes and hashes, its seal, and how they are verified.

`docs/checkpoints.md` describes the format for other tools. Nothing here unpickles, and nothing needs torch.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from config import json_text
from config.files import file_sha256
from training.checkpoint.run_record import read_record, run_in
from training.checkpoint.seal import unsealed

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"

NAME = re.compile(r"step-(0|[1-9][0-9]*)")
"""Folder name of a published checkpoint; the group is its step."""
_FIELDS = {
    "step": int,
    "written": str,
    "world_size": int,
    "zero_stage": int,
    "precision": dict,
    "data": dict,
    "versions": dict,
    "files": dict,
}
"""What every manifest of this format has, and of which type."""
_STATE_FIELDS = ("progress", "identity", "parameters", "reactions")

# Tensor name to its dtype and shape.
Tensors = dict[str, tuple[str, list[int]]]


class Unusable(Exception):
    """A checkpoint cannot be used. One line: the file, and what is wrong with it."""


class Damaged(Unusable):
    """A checkpoint differs from what was written."""


@dataclass(frozen=True)
class Written:
    """One file as its rank wrote it."""

    sha256: str
    bytes: int
    rank: int
    tensors: Tensors

    def as_plain(self) -> dict[str, Any]:
        """For the manifest; tensors as name to [dtype, shape]."""
        plain: dict[str, Any] = {"sha256": self.sha256, "bytes": self.bytes, "rank": self.rank}
        if self.tensors:
            plain["tensors"] = {name: [dtype, shape] for name, (dtype, shape) in self.tensors.items()}
        return plain


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`.

    Raises Damaged when it is missing or its seal does not match, Unusable when it is of another format, OSError when
    it cannot be read.
    """
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise _without_manifest(path) from None
    return parse_manifest(text)


def parse_manifest(text: bytes) -> dict[str, Any]:
    """The content of a manifest. Raises Damaged when its seal does not match, Unusable for another format."""
    try:
        manifest, intact = unsealed(text)
    except ValueError:
        raise Damaged(f"{MANIFEST} is not a whole manifest") from None
    if manifest.get("format") != FORMAT:
        raise Unusable(f"{MANIFEST} has format {manifest.get('format')}; this version reads format {FORMAT}")
    if not intact:
        raise Damaged(f"{MANIFEST} does not have the SHA-256 it was sealed with")
    for field, kind in _FIELDS.items():
        if not isinstance(manifest.get(field), kind):
            raise Damaged(f"{MANIFEST} has no {field} as docs/checkpoints.md describes it")
    for name, entry in manifest["files"].items():
        if not _is_file_entry(name, entry):
            raise Damaged(f"{MANIFEST} has an entry {name!r} that is no file of a checkpoint")
    return manifest


def _is_file_entry(name: str, entry: Any) -> bool:
    """Whether it names a file inside the checkpoint, its hash, its size and its rank."""
    path = PurePosixPath(name)
    inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    fields = {"sha256": str, "bytes": int, "rank": int}
    return inside and isinstance(entry, dict) and all(isinstance(entry.get(key), fields[key]) for key in fields)


def read_state(path: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint. Raises Damaged when it is not one, OSError when it cannot be read."""
    try:
        state = json_text.parse((path / STATE).read_bytes())
        missing = [field for field in _STATE_FIELDS if not isinstance(state.get(field), dict)]
    except FileNotFoundError:
        raise Damaged(f"{STATE} is missing") from None
    except (ValueError, AttributeError):
        raise Damaged(f"{STATE} is not JSON as it was written") from None
    if missing:
        raise Damaged(f"{STATE} has no {missing[0]}")
    return state


def check_sizes(path: Path, manifest: dict[str, Any]) -> None:
    """Raises Damaged for the first file that is missing or has another size; OSError when it cannot be checked."""
    if STATE not in manifest["files"]:
        raise Damaged(f"{MANIFEST} does not list {STATE}")
    for name, entry in manifest["files"].items():
        try:
            size = (path / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise Damaged(f"{name} is missing") from None
        if size != entry["bytes"]:
            raise Damaged(f"{name} has {size:,} bytes; the manifest says {entry['bytes']:,}")


def check_hashes(path: Path, manifest: dict[str, Any], names: Iterable[str]) -> None:
    """Raises Damaged for the first of `names` with another SHA-256; OSError when a file cannot be read."""
    for name in names:
        expected, found = manifest["files"][name]["sha256"], file_sha256(path / name)
        if found != expected:
            raise Damaged(f"{name} has SHA-256 {found[:12]}...; the manifest says {expected[:12]}...")


def files_of_rank(manifest: dict[str, Any], rank: int, world_size: int) -> list[str]:
    """The files that `rank` of `world_size` hashes: about the same bytes on each rank, every file once."""
    loads, mine = [0] * world_size, []
    for name, entry in sorted(manifest["files"].items(), key=lambda item: (-item[1]["bytes"], item[0])):
        lightest = loads.index(min(loads))
        loads[lightest] += entry["bytes"]
        if lightest == rank:
            mine.append(name)
    return mine


def is_whole(path: Path) -> bool:
    """Whether `find_problem` finds none. Hashes are not computed."""
    return find_problem(path) is None


def find_problem(
    path: Path, further: Callable[[dict[str, Any]], None] = lambda manifest: None, *, of_any_run: bool = False
) -> Unusable | None:
    """Why the checkpoint at `path` is unusable, or None. `further` checks its manifest, and may raise Unusable.

    of_any_run: also the checkpoint of another run than the folder's it lies in can be used.
    """
    try:
        manifest = read_manifest(path)
        _check_name(path, manifest)
        if not of_any_run:
            _check_run(path, manifest)
        check_sizes(path, manifest)
        further(manifest)
    except Unusable as problem:
        return problem
    except OSError as error:
        return Unusable(f"{error.filename or path} cannot be read: {error.strerror or error}")
    return None


def _check_name(path: Path, manifest: dict[str, Any]) -> None:
    """Raises Unusable when the folder is named after another step than the one that the manifest seals."""
    named = NAME.fullmatch(path.name)
    if named and int(named[1]) != manifest["step"]:
        right = f"step-{manifest['step']}"
        raise Unusable(f"{MANIFEST} is of step {manifest['step']}; rename the folder to {right} where that is right")


def _check_run(path: Path, manifest: dict[str, Any]) -> None:
    """Raises Unusable when the manifest seals another run than the one whose folder it lies in."""
    own, run = read_record(path.parent), run_in(manifest)
    if own and run and own.id != run[0]:
        raise Unusable(
            f"{MANIFEST} is of another run, {run[1]} ({run[0]}); run.resume={path} starts from it all the same"
        )


def _without_manifest(path: Path) -> Unusable:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if json_text.parse((path / STATE).read_bytes()).get("format") == 1:
            return Unusable(f"{STATE} has format 1, which has no hashes; this version reads format {FORMAT}")
    return Damaged(f"{MANIFEST} is missing")
