"""Prepare rows of any task: encode them batch by batch, count what happens to them, write shards and the index.

`prepare_rows` and `prepare_labelled` decide how a row becomes tokens and what is reported. A row is a dict of arrays:
`tokens`, and more that say what is trained on. Dropped, cut and skipped rows are counted in the index, and so in the
record of every run on it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from config.errors import UserError
from config.schema import DataSection
from data.batches.loader import IGNORED_LABEL
from data.corpora.corpus import SPLITS, TOKENIZER, tokenizer_sha256, write_index
from data.corpora.row_shards import write_tensors
from data.corpora.shards import token_dtype
from data.sources.row_formats import BadRow, Found
from data.sources.row_sources import is_held_out, located_rows
from data.sources.sources import Source
from data.text.preparation_progress import ProgressFile
from data.text.prepare import SHARD_TOKENS
from data.text.tokenizer import vocabulary_size

BATCH_ROWS = 512
_DETAIL = re.compile(r"(?<=\w)\[\d+\]| \((?:[^()]|\([^()]*\))*\)")
"""The part of a reason that differs from row to row: a number in a list, or a parenthesis."""
_REASONS, _PLACES = 4, 3
"""At most this many reasons for bad rows are named, each with at most this many rows."""
FIX = "correct the row, or set data.on_bad_row=skip"

Row = dict[str, np.ndarray]
Sequences = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Arranges rows by their lengths: the row numbers in sequence order, and where each sequence ends among them."""


@dataclass
class EncodedRows:
    """The rows of a batch that were kept, and counts of the others. A pair is two consecutive rows."""

    rows: list[Row] = field(default_factory=list)
    held_out: list[bool] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    longest: Counter[str] = field(default_factory=Counter)
    """[tokens] Length of the longest row, and of the longest source and target of task seq2seq."""
    bad: dict[str, list[Any]] = field(default_factory=dict)
    """Bad rows by reason: their number, then the places of the first few."""

    def add_facts(self, other: EncodedRows) -> None:
        """Add the counts of another batch, which comes after this one."""
        self.counts.update(other.counts)
        self.longest |= other.longest
        for reason, (count, *places) in other.bad.items():
            self.add_bad(reason, count, places)

    def add_bad(self, reason: str, count: int, places: list[str]) -> None:
        """Count bad rows under one reason, whatever the place inside a row."""
        found = self.bad.setdefault(_DETAIL.sub(lambda part: "[]" * (part[0][0] == "["), reason), [0])
        found[0] += count
        found += places[: _PLACES + 1 - len(found)]

    def packed(self) -> dict[str, np.ndarray]:
        """Everything as arrays: tokens and labels of the rows end to end, and the counts as JSON."""
        facts = json.dumps([self.counts, self.longest, self.bad]).encode()
        return {
            "tokens": np.concatenate([np.empty(0, np.int64), *(row["tokens"] for row in self.rows)]),
            "trained": np.concatenate([np.empty(0, np.uint8), *(row["trained"] for row in self.rows)]),
            "lengths": np.array([len(row["tokens"]) for row in self.rows], dtype=np.int64),
            "held_out": np.array(self.held_out, dtype=bool),
            "facts": np.frombuffer(facts, dtype=np.uint8),
        }

    @classmethod
    def unpacked(cls, arrays: Mapping[str, np.ndarray]) -> EncodedRows:
        """The inverse of `packed`."""
        ends = np.cumsum(arrays["lengths"])
        rows = [
            {name: arrays[name][end - length : end] for name in ("tokens", "trained")}
            for length, end in zip(arrays["lengths"], ends, strict=True)
        ]
        counts, longest, bad = json.loads(arrays["facts"].tobytes())
        return cls(rows, arrays["held_out"].tolist(), Counter(counts), Counter(longest), bad)

    def bad_rows(self) -> str:
        """The most frequent reasons for bad rows, each with its count and first places."""
        ordered = sorted(self.bad.items(), key=lambda item: -item[1][0])
        said = [
            f"{count:,} x {reason} ({_compact(places)}{', ...' if count > len(places) else ''})"
            for reason, (count, *places) in ordered[:_REASONS]
        ]
        others = sum(count for _, (count, *_) in ordered[_REASONS:])
        return "; ".join([*said, *([f"{others:,} for other reasons"] if others else [])])


def _compact(places: list[str]) -> str:
    """Places of one file with its name once, such as rows.jsonl:3, :17."""
    files = ["", *(place.rpartition(":")[0] for place in places)]
    pairs = zip(places, files, files[1:], strict=False)
    return ", ".join(place.removeprefix(mine) if mine == before else place for place, before, mine in pairs)


@dataclass
class BatchEncoder(ABC):
    """Turns located rows into tokens according to a config."""

    data: DataSection
    """Its format is resolved."""

    def __call__(self, batch: Iterable[Found]) -> EncodedRows:
        """Encode a batch. Raises UserError naming the first bad row, unless data.on_bad_row skips them."""
        found, problem, where = EncodedRows(), "", ""
        for where, row in batch:
            found.counts["rows"] += 1
            try:
                if isinstance(row, BadRow):
                    raise row
                held_out = is_held_out(row, self.data.validation_fraction)  # refuses text that no tokenizer reads
                kept = self.encode(row, found)
            except BadRow as error:
                if error.of_config:  # skipping such rows would leave none
                    raise UserError(f"{where}: {error}") from error
                problem = problem or f"{where}: {error}; {self.advice(row)}"
                found.counts["skipped"] += 1
                found.add_bad(str(error), 1, [where])
                continue
            found.rows += kept
            found.held_out += [held_out] * len(kept)
        if problem and self.data.on_bad_row == "error":
            bad, rows = found.counts["skipped"], found.counts["rows"]
            more = f"; of {rows:,} rows up to {where} {bad:,} do not fit: {found.bad_rows()}" if bad > 1 else ""
            raise UserError(problem + more)
        return found

    @abstractmethod
    def encode(self, row: dict[str, Any], found: EncodedRows) -> list[Row]:
        """The sequences that a row becomes, none if it is dropped, which `found` counts. Raises BadRow."""

    def advice(self, row: dict[str, Any] | BadRow) -> str:
        return FIX


class SplitWriter:
    """Collects the rows of one split and writes a shard whenever SHARD_TOKENS are held."""

    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        self._folder, self._split, self._dtype = folder, split, dtype
        self._held: list[Row] = []
        self._lengths, self._labels = array("i"), array("i")
        self._shards: list[dict[str, Any]] = []
        self.tokens = self.labels = self._held_tokens = 0
        self.sequences = 0

    @property
    def rows(self) -> int:
        return len(self._lengths)

    def add(self, row: Row) -> None:
        self._held.append({**row, "tokens": row["tokens"].astype(self._dtype)})
        self._lengths.append(len(row["tokens"]))
        self._labels.append(_labels_of(row))
        self.tokens, self.labels = self.tokens + self._lengths[-1], self.labels + self._labels[-1]
        self._held_tokens += self._lengths[-1]
        if self._held_tokens >= SHARD_TOKENS:
            self._flush()

    def finish(self, sequences: Sequences) -> dict[str, Any]:
        """Write the remaining rows and the sequences; returns this split's part of the index."""
        if self._held:
            self._flush()
        lengths = np.array(self._lengths, dtype=np.int32)
        rows, ends = sequences(lengths)
        self.sequences = len(ends)
        order = {"rows": rows, "ends": ends, "lengths": lengths, "labels": np.array(self._labels, dtype=np.int32)}
        entry = write_tensors(self._folder / f"{self._split}-sequences.safetensors", order)
        return {"shards": self._shards, "sequences": entry, "documents": self.rows, "text_bytes": 0}

    def _flush(self) -> None:
        tensors = {name: np.concatenate([np.atleast_1d(row[name]) for row in self._held]) for name in self._held[0]}
        tensors["ends"] = np.cumsum([len(row["tokens"]) for row in self._held], dtype=np.int64)
        path = self._folder / f"{self._split}-{len(self._shards):05d}.safetensors"
        self._shards.append(write_tensors(path, tensors))
        self._held, self._held_tokens = [], 0


def _labels_of(row: Row) -> int:
    if "trained" in row:
        return int(row["trained"].sum())
    return int((row["targets"] != IGNORED_LABEL).sum()) if row["targets"].ndim else 1


class Preparation:
    """Writes the rows of a source into a folder."""

    def __init__(self, data: DataSection, source: Source, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        """Save the tokenizer. data: with its format resolved."""
        self._data, self._source, self._folder, self._tokenizer = data, source, folder, tokenizer
        tokenizer.save_pretrained(folder / TOKENIZER)
        dtype = token_dtype(vocabulary_size(tokenizer))
        self.train, self.validation = self._writers = [SplitWriter(folder, split, dtype) for split in SPLITS]
        self.found = EncodedRows()
        """The counts of all rows, without the rows."""
        self._splits: dict[str, Any] = {}

    def write(self, parts: Iterable[EncodedRows], sequences: Sequences, report: ProgressFile) -> None:
        for part in parts:
            self.found.add_facts(part)
            for row, held_out in zip(part.rows, part.held_out, strict=True):
                self._writers[held_out].add(row)
            report("tokenizing", sum(writer.tokens for writer in self._writers))
        self._splits = {split: writer.finish(sequences) for split, writer in zip(SPLITS, self._writers, strict=True)}

    def counts(self) -> dict[str, Any]:
        longest = self.found.longest
        counts = {"format": self._data.format, "longest": longest["row"], **self.found.counts}
        if self._data.target_length is not None:
            counts |= {"longest source": longest["source"], "longest target": longest["target"]}
        tokens, labels = (self.train.tokens + self.validation.tokens), (self.train.labels + self.validation.labels)
        return counts | {"tokens": tokens, "trained": labels}

    def require_rows(self, too_long: str) -> None:
        """Raises UserError if no row is left to train on. too_long: the length that dropped rows exceeded."""
        label, counts = self._source.label, self.found.counts
        if self.train.rows:
            return
        if self.validation.rows:
            raise UserError(
                f"data.validation_fraction={self._data.validation_fraction:g}: all {self.validation.rows} rows of "
                f"{label} were drawn for validation. Set it to 0 or give more rows."
            )
        if not counts["rows"]:
            raise UserError(empty(self._source))
        why = f" ({self.found.bad_rows()})" if self.found.bad else ""
        what_to_do = "Correct the rows, or the keys of data that say what they are."
        cut = [f"{counts[key]} {key.replace(',', '')}, " for key in sorted(counts) if key.startswith("dropped, ")]
        if counts["dropped"] or cut:
            what_to_do = "Raise data.sequence_length, set data.too_long, or correct the rows."
        raise UserError(
            f"{label}: no row of {counts['rows']} is left to train on: {counts['dropped']} dropped as longer than "
            f"{too_long}, {''.join(cut)}{counts['skipped']} skipped{why}. {what_to_do}"
        )

    def publish(self, fingerprint: str, notes: list[str], **further: Any) -> None:
        """Write the index, last of all. notes: lines on what was decided and counted. further: more entries."""
        skipped = [f"data: rows skipped: {self.found.bad_rows()}"] if self.found.bad else []
        content = {
            "fingerprint": fingerprint,
            "source": self._source.label,
            "revision": self._source.revision(),
            "vocab_size": vocabulary_size(self._tokenizer),
            "end_of_document": self._tokenizer.eos_token_id,
            "tokenizer_sha256": tokenizer_sha256(self._folder / TOKENIZER),
            "sequence_length": self._data.sequence_length,
            "skipped": {reason: found[0] for reason, found in self.found.bad.items()},
            "counts": self.counts(),
            **further,
            "notes": [*notes, *skipped],
        }
        write_index(self._folder, content | self._splits)


def empty(source: Source) -> str:
    """Error text for a source without rows."""
    return f"{source.label}: holds no row: it is empty. Write rows into it, or name another file."


def batches_of(data: DataSection, source: Source) -> Iterator[list[Found]]:
    """The rows of a source in lists of BATCH_ROWS."""
    rows = located_rows(data, source)
    return iter(lambda: list(islice(rows, BATCH_ROWS)), [])


def source_of_texts(data: DataSection, source: Source, texts_of: Callable[[dict[str, Any]], Iterable[str]]) -> Source:
    """The text of the rows to train on as documents to train a BPE on. texts_of: may raise BadRow."""

    def texts() -> Iterator[Found]:
        for where, row in located_rows(data, source):
            with suppress(BadRow, UnicodeEncodeError):
                if not isinstance(row, BadRow) and not is_held_out(row, data.validation_fraction):
                    yield from ((where, {"text": text}) for text in texts_of(row))

    return replace(source, rows=texts, text_field="text", deduplicate=False)
