"""Sources of documents: streams with an identity, which represents the text in the corpus's fingerprint.

Local files: names (relative to data.path) and sizes, and the sha256 of the contents up to `HASHED_BYTES` in total, so
that copies of a corpus on two nodes are the same corpus whatever their times; above that size, modification times,
since hashing would delay every start by minutes. URLs: each with its size and its version according to the file system
(`remote`). Hub: id, name, split, and the revision if data.path pins one; otherwise prepared data stay in use when the
hub changes, and the revision that was read is recorded.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from config.errors import Unreadable, UserError, one_line
from config.files import file_sha256, globbed, hidden, no_file
from config.schema import DataSection
from config.task import COMPRESSIONS, JSON_SUFFIXES, is_url
from data.sources import megatron
from data.sources.file_rows import json_rows, parquet_rows, text_rows
from data.sources.files import compression_of
from data.sources.row_formats import BadRow, Found, json_kind, recognise

HASHED_BYTES = 1 << 30
"""[bytes] Local sources up to this size are identified by content, larger ones by modification time."""

_ROWS_WITHOUT = 1000
"""Stop looking for data.text_field after this many rows from the start lack it."""
_NO_TEXT = "not text; correct the row, or set data.text_field to the field that holds the document"
_PATTERNS = {
    "text": ("*",),
    "jsonl": tuple(f"*{name}{packed}" for name in JSON_SUFFIXES for packed in ("", *COMPRESSIONS)),
    "parquet": ("*.parquet",),
    "megatron": ("*.idx",),
}


@dataclass(frozen=True)
class Source:
    """Documents as a stream that can be read any number of times, always in the same order."""

    label: str
    """The config's key and value that name the source, for messages."""
    identity: str
    """The source's part of a corpus's fingerprint; see the module's docstring."""
    rows: Callable[[], Iterable[Found]]
    """Opens the stream of raw rows. Raises UserError, also while it is read."""
    total_bytes: int | None = None
    """[bytes] Total size of the files; None if unknown beforehand."""
    text_field: str = "text"
    null_means: str = "no text"
    """Reason under which a null document is counted as skipped."""
    deduplicate: bool = False
    """Leave out repeated documents. Keeps 16 bytes in memory for each document."""
    revision: Callable[[], str | None] = field(default=lambda: None)
    """Revision of a hub dataset, once it is opened."""
    files: tuple[str, ...] = ()
    """Paths or URLs of the files, in order."""
    ids_field: str | None = None
    """Field with a document's token ids, if it is already tokenized."""

    def documents(self, skipped: Counter[str], places: dict[str, str] | None = None) -> Iterator[str]:
        """Every document's text; `skipped` counts those left out, by reason. places: gets where the first null document
        is. Raises UserError."""
        places = {} if places is None else places
        seen: set[bytes] = set()
        lacking: list[dict[str, Any]] | None = []  # None: the field was seen
        for where, row in self.rows():
            if isinstance(row, BadRow):
                raise UserError(f"{where}: {row}; correct the row")
            if self.text_field in row:
                lacking = None
            elif lacking is not None:
                lacking.append(row)
                if len(lacking) == _ROWS_WITHOUT:
                    break
            text = row.get(self.text_field)
            if text is None:
                skipped[self.null_means] += 1
                places.setdefault(self.null_means, where)
            elif text == "":
                skipped["no text"] += 1
            elif not isinstance(text, str):
                raise UserError(f"{where}: {self.text_field}: is {json_kind(text)}, {_NO_TEXT}")
            elif self.deduplicate and _seen_before(text, seen):
                skipped["duplicate"] += 1
            else:
                yield text
        if lacking:
            raise UserError(
                f"data.text_field={self.text_field}: not a field of {self.label}; its fields are "
                f"{', '.join(sorted(lacking[0]))}. Set data.text_field to the one that holds the document"
                f"{_as_rows(lacking[0])}."
            )


def open_source(data: DataSection) -> Source:
    """The source that a config names. Raises UserError for a missing path or a path that matches no file."""
    if data.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return _text_source("data.source=stdlib", _local(root, list(_library_files(root)), "text"), deduplicate=True)
    if not data.path:
        raise UserError(f"data.path: missing; data.source={data.source} needs a path. Set data.path.")
    label = f"data.path={data.path}"
    if data.source == "text":
        return _text_source(label, _files(data.path, "text"), separator=data.document_separator)
    if data.source == "megatron":
        return _megatron_source(data.path, label)
    if data.source == "hub":
        source = _hub_source(data, label)
    else:
        files, read = _files(data.path, data.source), json_rows if data.source == "jsonl" else parquet_rows
        source = Source(
            label=label,
            identity=files.identity,
            rows=lambda: chain.from_iterable(map(read, files.names)),
            total_bytes=files.total_bytes,
            text_field=data.text_field,
            files=files.names,
        )
    if data.input_ids_field is None:
        return source
    identity = f"{source.identity}:ids of {json.dumps(data.input_ids_field)}"
    return replace(source, ids_field=data.input_ids_field, identity=identity, total_bytes=None)


@dataclass(frozen=True)
class _Files:
    names: tuple[str, ...]
    """Paths or URLs, in reading order."""
    identity: str
    total_bytes: int | None


def _files(path: str, source: str) -> _Files:
    """The files of data.path, on disk or behind a URL. Raises UserError."""
    if not is_url(path):
        return _local(*_local_files(path, source), source)
    from data.sources.remote import list_files

    found = sorted(list_files(path, _PATTERNS[source]), key=lambda file: _order(PurePosixPath(file.name), source))
    digest = hashlib.sha256(b"remote")
    for file in found:
        digest.update(f"\0{file.url.partition('?')[0]}\0{file.size}\0{file.version}".encode())
    sizes = [file.size for file in found if file.size is not None]
    whole = sum(sizes) if len(sizes) == len(found) else None
    return _Files(tuple(file.url for file in found), f"files:{digest.hexdigest()}", whole)


def _local(root: Path, files: list[Path], source: str) -> _Files:
    ordered = sorted(files, key=lambda path: _order(path.relative_to(root), source))
    size = sum(path.stat().st_size for path in ordered)
    return _Files(tuple(map(str, ordered)), _files_identity(root, ordered), size)


def _order(name: PurePath, source: str) -> Any:
    """Sort key: the whole name for text, folder by folder for rows. Corpora already prepared have these orders."""
    return name.as_posix() if source == "text" else name.parts


def _library_files(root: Path) -> Iterator[Path]:
    """The standard library's .py files; folders of installed packages, which may be far larger, are skipped."""
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in {"site-packages", "dist-packages"}]
        yield from (Path(folder, file) for file in files if file.endswith(".py"))


def _text_source(label: str, files: _Files, *, deduplicate: bool = False, separator: str | None = None) -> Source:
    identity = f"{files.identity}:unpacked" if any(map(compression_of, files.names)) else files.identity
    return Source(
        label=label,
        identity=identity if separator is None else f"{identity}:split at {json.dumps(separator)}",
        total_bytes=files.total_bytes,
        rows=partial(text_rows, files.names, separator),
        null_means="not utf-8",
        deduplicate=deduplicate,
        files=files.names,
    )


def _megatron_source(path: str, label: str) -> Source:
    whole = Path(path).expanduser()
    prefix = whole.with_suffix("") if whole.suffix == ".bin" else whole
    index = Path(f"{prefix}.idx")
    if whole.suffix == ".bin" and not index.is_file():
        raise UserError(f"data.path={path}: {index} is missing, which says where the documents of a .bin begin")
    root, found = (index.parent, [index]) if index.is_file() else _local_files(path, "megatron")
    files = sorted(file for file in found if file.suffix != ".bin")
    tokens = [megatron.bin_of(file) for file in files]
    return Source(
        label=label,
        identity=_files_identity(root, [*files, *(file for file in tokens if file.is_file())]),
        rows=lambda: (
            (f"{file}: document {number}", {"input_ids": ids})
            for file in files
            for number, ids in enumerate(megatron.documents(file), 1)
        ),
        files=tuple(map(str, files)),
        ids_field="input_ids",
    )


def _local_files(path: str, source: str) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and the files: one file, a folder's (recursive), or a glob's."""
    place = Path(path).expanduser()
    if place.is_file():
        return place.parent, [place]
    if place.is_dir():
        found = {file for pattern in _PATTERNS[source] for file in globbed(place, ("**", pattern))}
        files = [file for file in found if file.is_file() and not hidden(file.relative_to(place).as_posix())]
        root = place
    else:
        parts = place.parts
        split = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
        root = Path(*parts[:split])
        files = [file for file in set(globbed(root, parts[split:])) if file.is_file()]
    if not files:
        raise no_file(path, _PATTERNS[source])
    return root, files


def _files_identity(root: Path, files: list[Path]) -> str:
    ordered = sorted((path.relative_to(root).as_posix(), path) for path in files)
    by_content = sum(path.stat().st_size for path in files) <= HASHED_BYTES
    digest = hashlib.sha256(b"content" if by_content else b"modified")
    for name, path in ordered:
        status = path.stat()
        digest.update(f"\0{name}\0{status.st_size}\0".encode("utf-8", "surrogateescape"))
        if by_content:
            digest.update(bytes.fromhex(file_sha256(path)))
        else:
            digest.update(str(status.st_mtime_ns).encode())
    return f"files:{digest.hexdigest()}"


def _hub_source(data: DataSection, label: str) -> Source:
    """A dataset of the hub, a local copy of one, or a folder written by `Dataset.save_to_disk`."""
    assert data.path is not None
    folder = Path(data.path).expanduser()
    if folder.is_file() and folder.suffix in (".csv", ".tsv"):
        read = f"from_csv({str(folder)!r}{', sep=chr(9)' if folder.suffix == '.tsv' else ''})"
        program = f"import datasets; datasets.Dataset.{read}.to_json({str(folder.with_suffix('.jsonl'))!r})"
        raise UserError(
            f'data.path={data.path}: is a text table, which is not read; convert it to JSONL: python -c "{program}"'
        )
    if folder.is_file():
        raise UserError(
            f"data.path={data.path}: is a file, and data.source=hub needs a hub dataset or its folder; set "
            "data.source to what the file is: text, jsonl, parquet or megatron"
        )
    if folder.is_dir():
        check = "All files of a kind in a folder are read by data.source=jsonl or parquet."
        files = [path for path in folder.rglob("*") if path.is_file()]  # datasets does not follow links either
        files = [path for path in files if not hidden(path.relative_to(folder).as_posix())]
        identity = f"{_files_identity(folder, files)}:{data.name}:{data.split}"
    else:
        check = "Check that it exists, its format and the network."
        repository, _, pinned = data.path.partition("@")
        identity = f"hub:{repository}:{data.name}:{data.split}:{pinned}"
    revisions: list[str | None] = [None]

    def rows() -> Iterator[Found]:
        from data.sources import streams  # `datasets` takes longer to import than opening a prepared corpus

        try:
            stream, revision = streams.opened(data)
            revisions.append(revision)
            for number, row in enumerate(stream, 1):
                yield f"{label}: row {number}", row
        except streams.READ_ERRORS as error:
            raise Unreadable(f"{label}: cannot be read ({one_line(error)}). {check}") from error

    return Source(label=label, identity=identity, text_field=data.text_field, rows=rows, revision=lambda: revisions[-1])


def _as_rows(row: dict[str, Any]) -> str:
    """Advice on how to read rows with answers, if the source has such rows; else empty."""
    try:
        found = recognise(row, "")
    except BadRow:
        return ""
    if found == "preference":
        return "; pairs of answers are read by task=dpo"
    return f"; rows of format {found} are read by task=sft, and by task=distill with data.format={found}"


def _seen_before(text: str, seen: set[bytes]) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    if digest in seen:
        return True
    seen.add(digest)
    return False
