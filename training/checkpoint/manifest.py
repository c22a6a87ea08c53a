"""`manifest.json`: the files of a checkpoint with sizes and hashes, its seal, and how they are verified.

`docs/checkpoints.md` describes the format for other tools. Nothing here unpickles, and nothing needs torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
BLOCK = 1 << 22
"""[bytes] Read at a time when hashing."""

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


def sealed(content: dict[str, Any]) -> str:
    """The text of `manifest.json`: `content` and, last, the SHA-256 of its canonical JSON."""
    return json.dumps({**content, "sha256": _seal(content)}, indent=1) + "\n"


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
        manifest = json.loads(text)
        seal = manifest.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise Damaged(f"{MANIFEST} is not a whole manifest") from None
    if manifest.get("format") != FORMAT:
        raise Unusable(f"{MANIFEST} has format {manifest.get('format')}; this version reads format {FORMAT}")
    if seal != _seal(manifest):
        raise Damaged(f"{MANIFEST} does not have the SHA-256 it was sealed with")
    return manifest


def read_state(path: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint."""
    return json.loads((path / STATE).read_text(encoding="utf-8"))


def check_sizes(path: Path, manifest: dict[str, Any]) -> None:
    """Raises Damaged for the first file that is missing or has another size; OSError when it cannot be checked."""
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
    """Whether there is a sealed manifest and every file that it names has its size. Hashes are not computed."""
    return find_problem(path) is None


def find_problem(path: Path, further: Callable[[dict[str, Any]], None] = lambda manifest: None) -> Unusable | None:
    """Why the checkpoint at `path` is unusable, or None. `further` checks its manifest, and may raise Unusable."""
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
        further(manifest)
    except Unusable as problem:
        return problem
    except OSError as error:
        return Unusable(f"{error.filename or path} cannot be read: {error.strerror or error}")
    return None


def by_step(folder: Path) -> list[Path]:
    """Every published checkpoint in a checkpoints folder, whole or not, the highest step first."""
    found = [(int(p.name[5:]), p) for p in folder.glob("step-*") if p.name[5:].isdecimal()]
    return [p for _, p in sorted(found, reverse=True)]


def candidates(folder: Path) -> list[Path]:
    """What to resume from, best first: the checkpoint that LATEST names, then the others from the highest step down."""
    found, latest = by_step(folder), folder / "LATEST"
    if latest.is_file():
        named = folder / latest.read_text(encoding="utf-8").strip()
        found.sort(key=lambda path: path != named)  # stable: the others keep their order
    return found


def newest(folder: Path) -> Path | None:
    """The first of `candidates` that is whole; None if there is none."""
    return next((path for path in candidates(folder) if is_whole(path)), None)


def newest_before(folder: Path, step: int) -> Path | None:
    """The whole checkpoint of the highest step below `step`; None if there is none."""
    return next((path for path in by_step(folder) if int(path.name[5:]) < step and is_whole(path)), None)


def file_sha256(path: Path) -> str:
    """The file's SHA-256, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _without_manifest(path: Path) -> Unusable:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if read_state(path).get("format") == 1:
            return Unusable(f"{STATE} has format 1, which has no hashes; this version reads format {FORMAT}")
    return Damaged(f"{MANIFEST} is missing")
