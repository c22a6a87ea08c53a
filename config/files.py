"""Write files so that neither a reader nor a crash ever sees half of one; hash them, filter them, find folders."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from config.errors import UserError, one_line


def write_atomically(path: Path, content: bytes, *, flushed: bool = True) -> None:
    """Put `content` at `path` so that a reader, or a crash, only ever sees the old file or the whole new one.

    flushed: also after a power cut, which takes 10 ms and more.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write_flushed(aside, content) if flushed else aside.write_bytes(content)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    if flushed:
        flush(path.parent)  # the rename itself has to survive a power cut


def write_flushed(path: Path, content: bytes) -> None:
    """Write a small file and flush it to disk before returning. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flush(path: Path) -> None:
    """Flush a file's content or a folder's entries to disk before returning. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path, *, start: int = 0) -> str:
    """SHA-256, in hexadecimal, of the file's bytes from `start` on. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        return hashlib.file_digest(file, "sha256").hexdigest()


def why_not_writable(folder: Path) -> str:
    """Why nothing can be written into a folder, which is created if missing; empty if it can be written to."""
    if folder.parts[:1] == ("~",):  # libraries may leave it unexpanded
        return "HOME is not set"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return one_line(error)
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} may not be written"


def temporary_folder() -> Path:
    """A folder of this user beside the temporary files, the same one for every process. Raises OSError."""
    folder = Path(tempfile.gettempdir()) / f"mantissa-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} is not a folder of this user's")
    return folder


def hidden(name: str) -> bool:
    """Whether a file of a folder is skipped. Python writes __pycache__ at any time, which would change the corpus."""
    return any(part.startswith(".") or part == "__pycache__" for part in name.split("/"))


def globbed(root: Path, pattern: tuple[str, ...]) -> Iterator[Path]:
    """The paths below a folder that the parts of a pattern match. Unlike `Path.glob`, ** enters linked folders."""
    if "**" not in pattern:
        return root.glob(str(Path(*pattern)))
    at = pattern.index("**")
    tops = root.glob(str(Path(*pattern[:at]))) if at else [root]
    rest = pattern[at + 1 :] or ("*",)
    return (path for top in tops for folder in _folders(top) for path in globbed(folder, rest))


def _folders(root: Path) -> Iterator[Path]:
    """A folder and all below it, linked ones last unless they are hidden; each once, since links may form a cycle."""
    tops, seen = [root], set[tuple[int, int]]()
    for top in tops:
        for place, names, _ in os.walk(top):
            folder = Path(place)
            found = folder.stat()
            if (found.st_dev, found.st_ino) in seen:
                names.clear()
                continue
            seen.add((found.st_dev, found.st_ino))
            names.sort()
            links = [folder / name for name in names if (folder / name).is_symlink()]
            tops += [link for link in links if not hidden(link.relative_to(root).as_posix())]
            yield folder


def no_file(path: str, patterns: Sequence[str]) -> UserError:
    """The error for a data.path without files. patterns: of the files that its source reads."""
    wanted = " or ".join(patterns)
    return UserError(f"data.path={path}: no file there. Set data.path to a file, a folder with {wanted}, or a glob.")
