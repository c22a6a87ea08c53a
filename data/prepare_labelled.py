"""Prepare rows with labels once: read, turn into tokens as the tokenizer does for an encoder, publish.

It publishes as `prepare` does, in one process, since rows of a classification are short and few. Labels are counted
by name; which output of a model each is, is decided when training starts. What was dropped, cut or skipped is counted
in the index, and so in the record of every run on it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from config.errors import UserError
from config.schema import DataSection
from data.corpus import SPLITS, TOKENIZER, Corpus, open_corpus, tokenizer_sha256, write_index
from data.labelled_rows import LabelledRow, read_labelled, sorted_labels
from data.loader import IGNORED_LABEL
from data.preparation_progress import Progress, ProgressFile
from data.prepare import identified, published
from data.prepare_rows import what_to_do
from data.row_formats import BadRow
from data.row_shards import write_tensors
from data.row_sources import is_held_out, located_rows
from data.shards import token_dtype
from data.sources import Source
from data.tokenizer import make_encoder_tokenizer, tokenizer_identity, vocabulary_size

_VERSION = "labelled-1"
_SHARD_TOKENS = 1 << 26
"""[tokens] A shard is closed when it has so many."""
_FIX = "correct the row, or set data.on_bad_row=skip"
_SHOWN = 8
"""Labels whose share is said."""


def prepare_labelled(data: DataSection, *, progress: bool) -> Corpus:
    """Open the labelled rows that a config names, preparing them first if need be. data: with its format.

    Raises UserError for a source or tokenizer that cannot be read, a row that does not fit (data.on_bad_row), and what
    `prepare` raises it for.
    """
    source, fingerprint = identified(data, labelled_fingerprint)
    return open_corpus(published(data, source, fingerprint, _fill, progress=progress), verify=data.verify)


def labelled_fingerprint(data: DataSection, source: Source) -> str:
    """Name of the prepared rows: 20 hex digits of a hash over everything that decides them."""
    parts = [_VERSION, data.source, source.identity, tokenizer_identity(data.tokenizer)]
    parts += [getattr(data, key) for key in _DECIDING]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


_DECIDING = (
    *("format", "text_field", "text_pair_field", "label_field", "tokens_field", "tags_field"),
    *("on_bad_row", "too_long", "sequence_length", "validation_fraction"),
)


@dataclass(frozen=True)
class _Encoded:
    tokens: np.ndarray
    types: np.ndarray
    target: np.ndarray
    """() or (n,), as in the shards."""


class LabelledEncoder:
    """Turns rows into tokens with one tokenizer, and names of labels into numbers in the order in which they come."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, data: DataSection) -> None:
        self._data = data
        self.numbers: dict[str, int] = {}
        self._encoder: Tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._encoder.no_padding()
        self._encoder.no_truncation()
        self._encoder.encode_special_tokens = True  # a text that spells [SEP] stays text
        if data.too_long != "drop":
            side = data.too_long.removeprefix("truncate_")
            self._encoder.enable_truncation(data.sequence_length, direction=side)

    def __call__(self, row: LabelledRow, counts: Counter[str]) -> _Encoded | None:
        """The row as tokens; None where it is dropped, which `counts` says. Numbers the labels of kept rows."""
        found = self._encoder.encode(row.texts[0], row.texts[1] if len(row.texts) > 1 else None)
        if len(found.ids) > self._data.sequence_length:
            counts["dropped"] += 1
            return None
        target = self._target(row, found)
        if target is None:
            counts["dropped, because no label was left when cut"] += 1
            return None
        if found.overflowing:
            counts["truncated"] += 1
        return _Encoded(np.array(found.ids), np.array(found.type_ids, dtype=np.uint8), target)

    def _target(self, row: LabelledRow, found: Any) -> np.ndarray | None:
        if isinstance(row.target, float):
            return np.array(row.target, dtype=np.float64)
        if isinstance(row.target, str):
            return np.array(self._number(row.target), dtype=np.int32)
        targets = np.full(len(found.ids), IGNORED_LABEL, dtype=np.int32)
        offsets = np.array(found.offsets, dtype=np.int64).reshape(-1, 2)
        for (start, end), name in zip(row.words, row.target, strict=True):
            # special tokens have no characters; a byte-level token may begin with the space before its word
            inside = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
            if len(inside) and targets[inside[0]] == IGNORED_LABEL:
                targets[inside[0]] = self._number(name)
        return targets if (targets != IGNORED_LABEL).any() else None

    def _number(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


def _fill(data: DataSection, source: Source, fingerprint: str, folder: Path, report: ProgressFile) -> None:
    report(Progress("tokenizer", 0, None))
    tokenizer = _tokenizer(data, source)
    tokenizer.save_pretrained(folder / TOKENIZER)
    vocab_size = vocabulary_size(tokenizer)
    encode = LabelledEncoder(tokenizer, data)
    writers = {split: _SplitWriter(folder, split, token_dtype(vocab_size)) for split in SPLITS}
    counts: Counter[str] = Counter()
    longest, first_bad = 0, None
    for where, row in located_rows(data, source):
        counts["rows"] += 1
        try:
            if isinstance(row, BadRow):
                raise row
            held_out = is_held_out(row, data.validation_fraction)
            kept = encode(read_labelled(row, data), counts)
        except BadRow as error:
            if data.on_bad_row == "error":
                raise UserError(f"{where}: {error}; {_FIX}") from error
            counts["skipped"] += 1
            first_bad = first_bad or f"{where}: {error}"
            continue
        if kept is not None:
            longest = max(longest, len(kept.tokens))
            writers[SPLITS[int(held_out)]].add(kept)
        if counts["rows"] % 1000 == 0:
            report(Progress("tokens", sum(writer.tokens for writer in writers.values()), None))
    splits = {split: writer.finish() for split, writer in writers.items()}
    train, validation = writers["train"], writers["validation"]
    _require_something(data, source, counts, first_bad, train, validation)
    found: dict[str, Any] = {"format": data.format, "longest": longest, **counts}
    found |= {"tokens": train.tokens + validation.tokens, "trained": train.labels + validation.labels}
    write_index(
        folder,
        {
            "fingerprint": fingerprint,
            "source": source.label,
            "revision": source.revision(),
            "vocab_size": vocab_size,
            "end_of_document": tokenizer.eos_token_id,
            "tokenizer_sha256": tokenizer_sha256(folder / TOKENIZER),
            "sequence_length": data.sequence_length,
            "skipped": {"does not fit its format": counts["skipped"]} if counts["skipped"] else {},
            "counts": found,
            "labels": list(encode.numbers),
            "notes": _notes(data, found, train, validation, list(encode.numbers), first_bad),
            **splits,
        },
    )


def _tokenizer(data: DataSection, source: Source) -> PreTrainedTokenizerFast:
    """The tokenizer that data.tokenizer names; a BPE is trained on the texts of the rows."""

    def texts() -> Iterator[dict[str, Any]]:
        for _, row in located_rows(data, source):
            try:
                if not isinstance(row, BadRow):
                    text = "\n".join(read_labelled(row, data).texts)
                    text.encode()
                    yield {"text": text}
            except (BadRow, UnicodeEncodeError):
                continue

    of_rows = replace(source, open=texts, text_field="text", deduplicate=False)
    return make_encoder_tokenizer(data.tokenizer, of_rows, data.validation_fraction)


def _require_something(
    data: DataSection,
    source: Source,
    counts: Counter[str],
    first_bad: str | None,
    train: _SplitWriter,
    validation: _SplitWriter,
) -> None:
    if not counts["rows"]:
        raise UserError(f"{source.label}: holds no row: it is empty. Write rows into it, or name another file.")
    if not train.rows and validation.rows:
        raise UserError(
            f"data.validation_fraction={data.validation_fraction:g}: all {validation.rows} rows of {source.label} were "
            "drawn for validation. Set it to 0 or give more rows."
        )
    if not train.rows:
        reason = (
            f"{counts['dropped']} dropped as longer than {data.sequence_length} tokens, {counts['skipped']} skipped"
        )
        first = f" (first: {first_bad})" if first_bad else ""
        raise UserError(
            f"{source.label}: no row of {counts['rows']} is left to train on: {reason}{first}. "
            f"{what_to_do(dropped=bool(counts['dropped']))}"
        )


def _notes(
    data: DataSection,
    counts: dict[str, Any],
    train: _SplitWriter,
    validation: _SplitWriter,
    names: list[str],
    first_bad: str | None,
) -> list[str]:
    """What was counted, in words."""
    kept = f"data: {train.rows:,} rows of format {data.format} to train on, {validation.rows:,} rows held out"
    reasons = {key: counts.get(key, 0) for key in ("dropped", "truncated", "skipped")}
    kept += "".join(f", {count:,} {key}" for key, count in reasons.items() if count)
    kept += f"; the longest row has {counts['longest']:,} tokens"
    if data.format == "scored":
        mean = train.targets_sum / train.rows
        spread = math.sqrt(max(train.targets_squared / train.rows - mean**2, 0.0))
        said = f"data: {data.label_field} is {mean:.4g} on average, with a standard deviation of {spread:.4g}"
    else:
        most = train.counts.most_common(_SHOWN)
        shares = ", ".join(f"{names[number]} {count / train.labels:.1%}" for number, count in most)
        said = f"data: {len(names)} labels, in training: {shares}" + (", ..." if len(names) > _SHOWN else "")
        if validation.labels:
            best = validation.counts[most[0][0]] / validation.labels
            said += f"; always {names[most[0][0]]} would be right for {best:.1%} of those held out"
    return [kept, said, *([f"data: first row skipped: {first_bad}"] if first_bad else [])]


class _SplitWriter:
    """Collects the rows of one split and writes a shard of every _SHARD_TOKENS."""

    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        self._folder, self._split, self._dtype = folder, split, dtype
        self._rows: list[_Encoded] = []
        self._held = 0
        self._shards: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        self._labels: list[int] = []
        self.tokens = self.labels = 0
        """Of all rows so far."""
        self.counts: Counter[int] = Counter()
        """Labels by number."""
        self.targets_sum = self.targets_squared = 0.0
        """Of numbers to predict."""

    @property
    def rows(self) -> int:
        """Rows so far."""
        return len(self._lengths)

    def add(self, row: _Encoded) -> None:
        """Append a row."""
        self._rows.append(row)
        labels = row.target[row.target != IGNORED_LABEL] if row.target.ndim else row.target.reshape(1)
        if row.target.dtype == np.float64:
            self.targets_sum += float(row.target)
            self.targets_squared += float(row.target) ** 2
        else:
            self.counts.update(labels.tolist())
        self._lengths.append(len(row.tokens))
        self._labels.append(len(labels))
        self.tokens, self.labels = self.tokens + len(row.tokens), self.labels + len(labels)
        self._held += len(row.tokens)
        if self._held >= _SHARD_TOKENS:
            self._flush()

    def finish(self) -> dict[str, Any]:
        """Write what is left and the order; this split's part of the index."""
        if self._held:
            self._flush()
        order: dict[str, np.ndarray] = {
            "rows": np.arange(self.rows, dtype=np.int64),
            "ends": np.arange(1, self.rows + 1, dtype=np.int64),
            "lengths": np.array(self._lengths, dtype=np.int32),
            "labels": np.array(self._labels, dtype=np.int32),
        }
        entry = write_tensors(self._folder / f"{self._split}-sequences.safetensors", order)
        return {"shards": self._shards, "sequences": entry, "documents": self.rows, "text_bytes": 0}

    def _flush(self) -> None:
        by_token = self._rows[0].target.ndim > 0
        targets = [row.target for row in self._rows]
        tensors: dict[str, np.ndarray] = {
            "tokens": np.concatenate([row.tokens for row in self._rows]).astype(self._dtype),
            "types": np.concatenate([row.types for row in self._rows]),
            "targets": np.concatenate(targets) if by_token else np.stack(targets),
            "ends": np.cumsum([len(row.tokens) for row in self._rows], dtype=np.int64),
        }
        path = self._folder / f"{self._split}-{len(self._shards):05d}.safetensors"
        self._shards.append(write_tensors(path, tensors))
        self._rows, self._held = [], 0


def labels_of(corpus: Corpus, given: tuple[str, ...], data: DataSection) -> tuple[str, ...]:
    """The labels in the order of a model's outputs. given: classify.labels; empty: those of the data, sorted.

    data: the section that the corpus is of. Raises UserError where a label of the data is not among them, or all rows
    have one.
    """
    if len(corpus.labels) < 2:
        key = "data.tags_field" if data.format == "tagged" else "data.label_field"
        field = data.tags_field if data.format == "tagged" else data.label_field
        raise UserError(f"{key}={field}: all rows have one label, so there is nothing to learn. Name another field.")
    missing = [name for name in sorted_labels(corpus.labels) if name not in given]
    if given and missing:
        raise UserError(f"classify.labels: lacks {missing[0]!r}, which rows of {corpus.source} have; name it too")
    return given or sorted_labels(corpus.labels)
