"""A prepared corpus on disk: its index, its tokenizer and its two splits.

The folder, all of it published at once by a rename:

    <cache_dir>/<fingerprint>/
        train-00000.safetensors ...         see `shards`
        validation-00000.safetensors ...    none when data.validation_fraction is 0
        tokenizer/                          a Hugging Face tokenizer folder
        index.json                          written last: every shard's size, header and sha256, and its own checksum
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config import json_text
from config.errors import UserError
from config.files import file_sha256, write_flushed
from config.json_text import json_sha256
from config.schema import DataSection
from data.corpora.labelled_shards import LabelledShards
from data.corpora.mixture import Mixture
from data.corpora.row_shards import RowShards, Split, open_tensors
from data.corpora.shards import TokenShards, damaged, open_shard

INDEX = "index.json"
TOKENIZER = "tokenizer"
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Corpus:
    """Prepared data, opened and checked."""

    folder: Path
    fingerprint: str
    """Name, from what the tokens were made of."""
    content: str
    """Hash of the tokens, the tokenizer and the names of labels."""
    tokenizer_folder: Path
    vocab_size: int
    """[ids] Embedding rows a model needs."""
    end_of_document: int
    """[id] Token after every document."""
    train: Split
    validation: Split
    """May be empty."""
    train_documents: int
    validation_documents: int
    skipped: dict[str, int]
    """Documents left out, by reason: "not utf-8", "no text", "duplicate"; rows: those that do not fit their format."""
    source: str
    """The config's key and value that named the source."""
    tail_tokens: int = 0
    """[tokens] Held out from the end of the longest document, because no whole document was (data/text/holdout.py)."""
    counts: dict[str, Any] = field(default_factory=dict)
    """Numbers of dropped, truncated and skipped rows and the like, by name. Empty for documents."""
    mixture: Mixture | None = None
    """The mixture of several sources; None for one source."""
    validation_by_source: dict[str, Split] = field(default_factory=dict)
    """Validation sets by the name of their source or set, if there are several."""
    targets: Path | None = None
    """Folder of a teacher's cached answers to every sequence (training/tasks/cached_teacher.py)."""
    notes: tuple[str, ...] = ()
    """Human-readable lines on what was decided and counted while the rows were prepared."""
    labels: tuple[str, ...] = ()
    """Label names by their number on disk; empty for rows without labels."""


def is_prepared(folder: Path) -> bool:
    """Whether the folder holds a finished corpus; does not check for damage. Raises UserError if it cannot be read."""
    try:
        return (folder / INDEX).is_file()
    except OSError as error:
        raise UserError(f"data.cache_dir: {folder} cannot be read ({error.strerror}). Set another folder.") from error


def fingerprint_of_parts(parts: list[Any]) -> str:
    """Name of a corpus: 20 hex digits of a hash over everything that determines it."""
    return json_sha256(parts)[:20]


def write_index(folder: Path, content: dict[str, Any]) -> None:
    """Write index.json to stable storage, with a checksum of its content."""
    document = {"sha256": json_sha256(content, sort_keys=True), "content": content}
    write_flushed(folder / INDEX, json.dumps(document, indent=1).encode())


def tokenizer_sha256(folder: Path) -> str:
    return file_sha256(folder / "tokenizer.json")


def open_corpus(folder: Path, *, verify: bool) -> Corpus:
    """Open a prepared corpus; shard checksums are compared with `verify`. Raises UserError naming the damaged file."""
    index = _read_index(folder)
    train, validation = (_open_split(folder, index, split, verify=verify) for split in SPLITS)
    try:
        intact = tokenizer_sha256(folder / TOKENIZER) == index["tokenizer_sha256"]
    except OSError as error:
        raise damaged(folder / TOKENIZER, f"its tokenizer.json cannot be read: {type(error).__name__}") from error
    if not intact:
        raise damaged(folder / TOKENIZER, "its tokenizer.json is not the one the tokens were made with")
    same = ("fingerprint", "vocab_size", "end_of_document", "skipped", "source")
    return Corpus(
        **{key: index[key] for key in same},
        folder=folder,
        content=_content(index),
        tokenizer_folder=folder / TOKENIZER,
        train=train,
        validation=validation,
        train_documents=index["train"]["documents"],
        validation_documents=index["validation"]["documents"],
        counts=index.get("counts", {}),
        notes=tuple(index.get("notes", _of_documents(index))),
        labels=tuple(index.get("labels", ())),
    )


def _content(index: dict[str, Any]) -> str:
    """`Corpus.content`. The sha256 of a shard of documents is that of its tokens, without the source in its header."""
    parts = [index[split] for split in SPLITS]
    tokens = [[entry.get("header", entry)["sha256"] for entry in part["shards"]] for part in parts]
    orders = [part["sequences"]["sha256"] for part in parts if "sequences" in part]
    return json_sha256([tokens, orders, index["tokenizer_sha256"], index.get("labels")])


def _of_documents(index: dict[str, Any]) -> list[str]:
    """Lines on the documents that were left out, which the standard library always has, and on their first token."""
    places = index.get("skipped_places", {})
    said = [
        f"{count:,} {reason}" + (f" (the first: {places[reason]})" if reason in places else "")
        for reason, count in sorted(index["skipped"].items())
    ]
    notes = [f"data: documents left out: {', '.join(said)}"] if said and index["source"] != "data.source=stdlib" else []
    if index.get("left_off"):
        what = f"data: documents begin without {index['left_off']}, which the tokenizer puts before a text"
        notes.append(f"{what}; set data.begin_of_document=auto if the model was trained with it")
    return notes


def _open_split(folder: Path, index: dict[str, Any], split: str, *, verify: bool) -> Split:
    entries = index[split]["shards"]
    if "sequences" not in index[split]:
        return TokenShards([open_shard(folder / entry["file"], entry, verify=verify) for entry in entries])
    shards = [open_tensors(folder / entry["file"], entry, verify=verify) for entry in entries]
    order = index[split]["sequences"]
    order = open_tensors(folder / order["file"], order, verify=verify)
    kind = LabelledShards if "labels" in index else RowShards
    return kind(shards, order, sequence_length=index["sequence_length"])


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        document = json_text.parse(path.read_bytes())
        content = document["content"]
        intact = document["sha256"] == json_sha256(content, sort_keys=True)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, f"it cannot be read: {type(error).__name__}") from error
    if not intact:
        raise damaged(path, "its content does not match its sha256")
    return content


def labels_of(corpus: Corpus, given: tuple[str, ...], data: DataSection) -> tuple[str, ...]:
    """Labels in the order of a model's outputs. given: classify.labels; empty: those of the data, by value if all are
    numbers, else alphabetical. Raises UserError."""
    if len(corpus.labels) < 2:
        key = "tags_field" if data.format == "tagged" else "label_field"
        raise UserError(
            f"data.{key}={getattr(data, key)}: all rows have the same label, which teaches nothing. Name another field."
        )
    numbers = all(name.removeprefix("-").isdecimal() for name in corpus.labels)
    found = tuple(sorted(corpus.labels, key=int if numbers else str))
    missing = [name for name in found if name not in given]
    if given and missing:
        raise UserError(f"classify.labels: lacks {missing[0]!r}, which rows of {corpus.source} have; name it too")
    return given or found


def lost(counts: Mapping[str, Any]) -> str:
    """Counts of dropped, truncated and skipped rows, as the end of a sentence; empty if there are none."""
    dropped = sorted(key for key in counts if key.startswith("dropped"))  # too long, or with nothing left by cutting
    names = [key for key in (*dropped, "truncated", "skipped") if counts.get(key)]
    return "".join(f", {counts[key]:,} {key.replace(',', '')}" for key in names)
