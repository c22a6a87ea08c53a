"""`manifest.json`: the files of a checkpoint with sizes and hashes, its seal, and how they are verified."""

import hashlib
import heapq
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from config import json_text
from config.files import file_sha256
from config.json_text import unsealed
from training.checkpoint.run_record import read_record

FORMAT = 3
_READABLE = (2, FORMAT)
MANIFEST = "manifest.json"
STATE = "state.json"

NAME = re.compile(r"step-(0|[1-9][0-9]*)")
"""Folder name of a published checkpoint; the group is its step."""
_FIELDS: dict[str, type] = {"written": str} | dict.fromkeys(("step", "world_size", "zero_stage"), int)
_FIELDS |= dict.fromkeys(("precision", "data", "versions", "files", "layouts"), dict)
_STATE_FIELDS = ("progress", "identity", "parameters", "reactions")

# Tensor name to its dtype and shape.
Tensors = dict[str, tuple[str, list[int]]]


class Unusable(Exception):
    """A checkpoint cannot be used. The message is one line: the file and its problem."""


class Damaged(Unusable):
    """A checkpoint differs from what was written."""


@dataclass(frozen=True)
class Written:
    """One file as its rank wrote it."""

    sha256: str
    bytes: int
    rank: int
    layout: str = ""
    """`layout_of` its tensors; the manifest lists each layout once for all files that have it."""


def layout_of(tensors: Tensors) -> str:
    """A short hash of names, dtypes and shapes; empty without tensors."""
    return hashlib.sha256(json.dumps(tensors).encode()).hexdigest()[:16] if tensors else ""


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`. Raises like `parse_manifest`, and OSError when it cannot be read."""
    try:
        return parse_manifest((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None


def parse_manifest(text: bytes) -> dict[str, Any]:
    """The content of a manifest, in format 3. Raises Damaged for a wrong seal, Unusable for other formats."""
    try:
        manifest, intact = unsealed(text)
    except ValueError:
        raise Damaged(f"{MANIFEST} is not a complete manifest") from None
    if manifest.get("format") not in _READABLE:
        reads = f"this version reads formats {' and '.join(map(str, _READABLE))}"
        raise Unusable(f"{MANIFEST} has format {manifest.get('format')}; {reads}")
    if not intact:
        raise Damaged(f"{MANIFEST} does not have the SHA-256 it was sealed with")
    if manifest["format"] == 2:  # which lists the tensors of each file
        manifest |= {"format": FORMAT, "layouts": {}}
    for field, kind in _FIELDS.items():
        if not isinstance(manifest.get(field), kind):
            raise Damaged(f"{MANIFEST} has no {field} as docs/checkpoints.md describes it")
    for name, entry in manifest["files"].items():
        path, fields = PurePosixPath(name), {"sha256": str, "bytes": int, "rank": int}.items()
        inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
        if not (inside and isinstance(entry, dict) and all(isinstance(entry.get(key), kind) for key, kind in fields)):
            raise Damaged(f"{MANIFEST} has an entry {name!r} that is not a checkpoint file")
        if "layout" not in entry:
            tensors = entry.pop("tensors", {})
            entry["layout"] = layout_of(tensors)
            manifest["layouts"][entry["layout"]] = tensors
    return manifest


def read_state(path: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint. Raises Damaged when it is not one, OSError when it cannot be read."""
    try:
        state = json_text.parse((path / STATE).read_bytes())
        missing = [field for field in _STATE_FIELDS if not isinstance(state.get(field), dict)]
    except FileNotFoundError:
        raise Damaged(f"{STATE} is missing") from None
    except (ValueError, AttributeError):
        raise Damaged(f"{STATE} is not the JSON that was written") from None
    if missing:
        raise Damaged(f"{STATE} has no {missing[0]}")
    return state


def check_sizes(path: Path, manifest: dict[str, Any]) -> None:
    """Raises Damaged for the first file that is missing or has the wrong size; OSError when it cannot be checked."""
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
    """Raises Damaged for the first of `names` with a wrong SHA-256; OSError when a file cannot be read."""
    for name in names:
        expected, found = manifest["files"][name]["sha256"], file_sha256(path / name)
        if found != expected:
            raise Damaged(f"{name} has SHA-256 {found[:12]}...; the manifest says {expected[:12]}...")


def shares_of(manifest: dict[str, Any], world_size: int) -> list[list[str]]:
    """The files for each of `world_size` ranks to hash: about the same bytes on each rank, every file once."""
    loads, shares = [(0, rank) for rank in range(world_size)], [list[str]() for _ in range(world_size)]
    for name, entry in sorted(manifest["files"].items(), key=lambda item: (-item[1]["bytes"], item[0])):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + entry["bytes"], rank))
        shares[rank].append(name)
    return shares


def is_whole(path: Path) -> bool:
    """Whether `find_problem` finds none. Hashes are not computed."""
    return find_problem(path) is None


def find_problem(
    path: Path, further: Callable[[dict[str, Any]], None] = lambda manifest: None, *, of_any_run: bool = False
) -> Unusable | None:
    """Why the checkpoint at `path` is unusable, or None. further: checks its manifest, may raise Unusable. of_any_run:
    accept checkpoints of other runs than the folder's."""

    def check() -> None:
        manifest = read_manifest(path)
        named, own = NAME.fullmatch(path.name), read_record(path.parent)
        if named and int(named[1]) != manifest["step"]:
            right = f"step-{manifest['step']}"
            raise Unusable(f"{MANIFEST} is of step {manifest['step']}; rename the folder to {right} if that is right")
        if not of_any_run and own and (other := own.other_than(manifest)):
            raise Unusable(f"{MANIFEST} is of {other}; run.resume={path} starts from it")
        check_sizes(path, manifest)
        further(manifest)

    return problem_of(check, path)


def problem_of(check: Callable[[], None], path: Path) -> Unusable | None:
    """The Unusable that `check` raises for the checkpoint at `path`, or for an unreadable file; else None."""
    try:
        check()
    except Unusable as problem:
        return problem
    except OSError as error:
        return Unusable(f"{error.filename or path} cannot be read: {error.strerror or error}")
    return None
