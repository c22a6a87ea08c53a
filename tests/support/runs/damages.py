"""Ways to damage the files of a run: each takes the path of one file, which is whole before."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config.files import file_sha256
from config.json_text import sealed, unsealed
from training.checkpoint.manifest import MANIFEST

Act = Callable[[Path], object]

NESTED = b'{"event":' + b"[" * 100_000
"""JSON that no parser follows to its end."""
NESTED_AND_CLOSED = b'{"event":' + b"[" * 700 + b"]" * 700 + b"}\n"
"""JSON that a parser reads, and that is too deep for what walks through it."""
BINARY = bytes(range(256)) * 8


def removed(path: Path) -> None:
    """The file, or the folder, is gone."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def folder(path: Path) -> None:
    """A folder of that name instead."""
    removed(path)
    path.mkdir()


def looped(path: Path) -> None:
    """A link to itself instead."""
    removed(path)
    path.symlink_to(path.name)


def flipped(path: Path) -> None:
    """One bit of a byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def halved(path: Path) -> None:
    """Cut off in the middle, as by a copy that broke off."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def zeroed(path: Path) -> None:
    """Zeros of the same size, as after a power cut."""
    path.write_bytes(bytes(path.stat().st_size))


def holding(content: bytes) -> Act:
    """Another content."""
    return lambda path: path.write_bytes(content)


COMMON = {
    "gone": removed,
    "a folder": folder,
    "a link to itself": looped,
    "a flipped bit": flipped,
    "half": halved,
    "zeros": zeroed,
    "empty": holding(b""),
    "binary": holding(BINARY),
    "a list": holding(b"[]"),
    "nested": holding(NESTED),
    "nested and closed": holding(NESTED_AND_CLOSED),
}
"""Damage that may happen to any file."""


def common(files: dict[str, str]) -> dict[str, tuple[str, Act]]:
    """Each file with each of these kinds of COMMON damage, by the name of both."""
    return {f"{name}: {how}": (name, COMMON[how]) for name, hows in files.items() for how in hows.split(", ")}


def after(content: bytes) -> Act:
    """Something appended."""
    return lambda path: path.write_bytes(path.read_bytes() + content)


def lines(change: Callable[[list[bytes]], list[bytes]]) -> Act:
    """Lines in another order or number."""
    return lambda path: path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def line(number: int, content: bytes) -> Act:
    """Another content in place of one line, counted from 0."""

    def change(all_lines: list[bytes]) -> list[bytes]:
        all_lines[number] = content + b"\n"
        return all_lines

    return lines(change)


def edited(change: Callable[[Any], Any]) -> Act:
    """JSON with another value."""
    return lambda path: path.write_bytes(json.dumps(change(json.loads(path.read_bytes()))).encode())


def sealed_again(change: Callable[[dict[str, Any]], Any]) -> Act:
    """A sealed file with another content, whose seal is right."""

    def act(path: Path) -> None:
        content, _ = unsealed(path.read_bytes())
        path.write_text(sealed({**content, **change(content)}))

    return act


def in_its_manifest(act: Act) -> Act:
    """Damage to a file of a checkpoint that its manifest knows as it then is: made by a program, not by a disk."""

    def whole(path: Path) -> None:
        act(path)
        entry = {"sha256": file_sha256(path), "bytes": path.stat().st_size}
        known = sealed_again(lambda m: {"files": m["files"] | {path.name: m["files"][path.name] | entry}})
        known(path.parent / MANIFEST)

    return whole
