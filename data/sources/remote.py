"""Files of data.path behind a URL, through fsspec: their names, versions and bytes."""

from __future__ import annotations

import fnmatch
import glob
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.registry import known_implementations

from config.errors import UserError, one_line
from config.files import hidden, no_file

_WEB = ("http", "https")
_VERSIONS = (
    *("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "crc32c", "Digest", "blob_id", "generation"),
    *("LastModified", "Last-Modified", "last_modified", "mtime", "updated", "created"),
)
"""File systems' names for a file's version, those derived from content before times."""
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class RemoteFile:
    """One file's name, size and version."""

    url: str
    name: str
    """Relative to the folder that data.path names, or in which its glob begins."""
    size: int | None
    """[bytes] None if the file system does not report it."""
    version: str
    """An ETag, a checksum or a time, as far as the file system reports one; it changes with the content. Else ""."""


def list_files(url: str, patterns: Sequence[str]) -> list[RemoteFile]:
    """The file at a URL, those of a folder whose names fit a pattern, or those of a glob. Raises UserError."""
    try:
        system, root = _connect(url)
        system.invalidate_cache()
        found = dict(_found(system, root, patterns))
    except ImportError as error:
        package = known_implementations.get(url.partition("://")[0], {"class": "fsspec"})["class"].partition(".")[0]
        how = "" if package == "fsspec" else f" (pip install {package})"
        raise UserError(f"data.path={url}: {one_line(error)}. Install it{how}, or copy the files to a disk.") from error
    except Exception as error:
        # For a web server that does not answer, fsspec raises FileNotFoundError too.
        cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
        if cause is not None and getattr(cause, "status", None) != HTTPStatus.NOT_FOUND:
            raise UserError(
                f"data.path={url}: cannot be read ({one_line(cause)}). Check the URL, the credentials and the network."
            ) from error
        found = {}
    if not found:
        raise no_file(url, patterns)
    return [
        RemoteFile(system.unstrip_protocol(path), name, info.get("size"), _version(info))
        for path, (name, info) in found.items()
    ]


def opened(url: str, *, seekable: bool = False) -> BinaryIO:
    """A file for reading; raises its store's own errors. seekable: only for servers that support range requests."""
    system, path = _connect(url)
    # One request for a whole file, which every server can answer, or one for each part of it.
    whole = {"block_size": 0} if _is_web(url) and not seekable else {}
    return cast(BinaryIO, io.BufferedReader(system.open(path, mode="rb", **whole), _BUFFER_BYTES))


def _is_web(url: str) -> bool:
    return url.partition("://")[0] in _WEB


def _connect(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    options: dict[str, Any] = {}
    if _is_web(url):
        import aiohttp

        # Proxies come from the environment. A file may take longer than aiohttp's five minutes.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=300)
        options = {"client_kwargs": {"trust_env": True, "timeout": timeout}}
    return cast(tuple[Any, str], fsspec.core.url_to_fs(url, **options))


def _found(system: Any, root: str, patterns: Sequence[str]) -> Iterator[tuple[str, tuple[str, dict[str, Any]]]]:
    """Path, name and file system metadata of every file."""
    web = _is_web(root)
    path = root.partition("?")[0] if web else root  # in a URL `?` begins the query
    if glob.has_magic(path):
        parts = path.split("/")
        base = "/".join(parts[: next(index for index, part in enumerate(parts) if glob.has_magic(part))])
        listed, patterns = system.glob(root, detail=True), ("*",)
    elif (web and root.endswith("/")) or (info := system.info(root))["type"] == "directory":
        base, listed = root.rstrip("/"), system.find(root, detail=True)
        listed = {found: info for found, info in listed.items() if not hidden(found.removeprefix(base))}
    else:
        yield root, (PurePosixPath(path).name, info)
        return
    for found, info in listed.items():
        name = found.removeprefix(base).lstrip("/")
        if info["type"] == "file" and any(fnmatch.fnmatchcase(PurePosixPath(name).name, each) for each in patterns):
            # A web server's list of links has no metadata.
            yield found, (name, info if _version(info) else system.info(found))


def _version(info: dict[str, Any]) -> str:
    return next((f"{key}={info[key]}" for key in _VERSIONS if info.get(key)), "")
