"""Prepare rows with labels once: read, tokenize as for an encoder, publish.

It publishes as `prepare` does, in one process, since rows for classification are short and few. Labels are counted by
name; their order among a model's outputs is decided when training starts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from transformers import PreTrainedTokenizerFast

from config.schema import DataSection
from data.batches.loader import IGNORED_LABEL
from data.corpora.corpus import SPLITS, Corpus, fingerprint_of_parts, lost
from data.rows.packing import by_number
from data.rows.row_preparation import BatchEncoder, EncodedRows, Preparation, Row, batches_of, source_of_texts
from data.sources.labelled_rows import LabelledRow, read_labelled
from data.sources.sources import Source
from data.text.encode import encoder_of_text
from data.text.preparation_progress import ProgressFile
from data.text.prepare import prepared
from data.text.tokenizer import make_encoder_tokenizer, tokenizer_identity

_VERSION = "labelled-1"
_SHOWN = 8
"""At most this many labels are noted with their share."""


def prepare_labelled(data: DataSection, *, progress: bool) -> Corpus:
    """The labelled rows that a config names, prepared if need be. data: with its format resolved. Raises UserError."""
    return prepared(data, labelled_fingerprint, _fill, progress=progress)


def labelled_fingerprint(data: DataSection, source: Source) -> str:
    """Name of the prepared rows: 20 hex digits of a hash over everything that determines them."""
    parts = [_VERSION, data.source, source.identity, tokenizer_identity(data.tokenizer)]
    parts += [getattr(data, key) for key in _DECIDING]
    return fingerprint_of_parts(parts)


_DECIDING = (
    *("format", "text_field", "text_pair_field", "label_field", "tokens_field", "tags_field"),
    *("on_bad_row", "too_long", "sequence_length", "validation_fraction"),
)


class LabelledEncoder(BatchEncoder):
    """Turns rows into tokens with one tokenizer, and label names into numbers in order of first appearance."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, data: DataSection) -> None:
        super().__init__(data)
        self.numbers = defaultdict[str, int](count().__next__)
        self._encoder = encoder_of_text(tokenizer.backend_tokenizer.to_str())
        if data.too_long != "drop":
            side = data.too_long.removeprefix("truncate_")
            self._encoder.enable_truncation(data.sequence_length, direction=side)

    def encode(self, row: dict[str, Any], found: EncodedRows) -> list[Row]:
        """Tokens, types and target as stored in the shards. Numbers the labels of rows that are kept."""
        read = read_labelled(row, self.data)
        encoding = self._encoder.encode(read.texts[0], read.texts[1] if len(read.texts) > 1 else None)
        if len(encoding.ids) > self.data.sequence_length:
            found.counts["dropped"] += 1
            return []
        target = self._target(read, encoding)
        if target is None:
            found.counts["dropped, because cutting left no label"] += 1
            return []
        if encoding.overflowing:
            found.counts["truncated"] += 1
        found.longest |= Counter(row=len(encoding.ids))
        types = np.array(encoding.type_ids, dtype=np.uint8)
        return [{"tokens": np.array(encoding.ids), "types": types, "targets": target}]

    def _target(self, row: LabelledRow, found: Any) -> np.ndarray | None:
        if isinstance(row.target, float):
            return np.array(row.target, dtype=np.float64)
        if isinstance(row.target, str):
            return np.array(self.numbers[row.target], dtype=np.int32)
        targets = np.full(len(found.ids), IGNORED_LABEL, dtype=np.int32)
        offsets = np.array(found.offsets, dtype=np.int64).reshape(-1, 2)
        for (start, end), name in zip(row.words, row.target, strict=True):
            # special tokens have no characters; a byte-level token may begin with the space before its word
            inside = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
            if len(inside) and targets[inside[0]] == IGNORED_LABEL:
                targets[inside[0]] = self.numbers[name]
        return targets if (targets != IGNORED_LABEL).any() else None


def _fill(data: DataSection, source: Source, fingerprint: str, folder: Path, report: ProgressFile) -> None:
    report("making the tokenizer for")
    of_rows = source_of_texts(data, source, partial(_texts_of, data))
    tokenizer = make_encoder_tokenizer(data.tokenizer, of_rows, 0.0)
    preparation = Preparation(data, source, folder, tokenizer)
    encode = LabelledEncoder(tokenizer, data)
    preparation.write(map(encode, batches_of(data, source)), by_number, report)
    preparation.require_rows(f"{data.sequence_length} tokens")
    names = list(encode.numbers)
    preparation.publish(fingerprint, _notes(data, preparation, folder, names), labels=names)


def _texts_of(data: DataSection, row: dict[str, Any]) -> list[str]:
    text = "\n".join(read_labelled(row, data).texts)
    text.encode()  # raises for text that a tokenizer cannot be trained on
    return [text]


def _targets(folder: Path, split: str) -> np.ndarray:
    """(n,) the targets of one split: numbers of labels, or float64."""
    files = sorted(folder.glob(f"{split}-0*.safetensors"))
    targets = [safe_open(file, "np").get_tensor("targets") for file in files]
    found = np.concatenate(targets) if targets else np.empty(0, dtype=np.int32)
    return found if found.dtype == np.float64 else found[found != IGNORED_LABEL]


def _notes(data: DataSection, preparation: Preparation, folder: Path, names: list[str]) -> list[str]:
    counts, train, validation = preparation.counts(), preparation.train, preparation.validation
    kept = f"data: {train.rows:,} rows of format {data.format} to train on, {validation.rows:,} rows held out"
    kept += f"{lost(counts)}; the longest row has {counts['longest']:,} tokens"
    of_train, of_validation = (_targets(folder, split) for split in SPLITS)
    if data.format == "scored":
        said = f"data: {data.label_field} is {of_train.mean():.4g} on average, with a standard deviation of "
        said += f"{of_train.std():.4g}"
    else:
        most = Counter(of_train.tolist()).most_common(_SHOWN)
        shares = ", ".join(f"{names[number]} {count / len(of_train):.1%}" for number, count in most)
        said = f"data: {len(names)} labels, in training: {shares}" + (", ..." if len(names) > _SHOWN else "")
        if len(of_validation):
            best = (of_validation == most[0][0]).mean()
            said += f"; always {names[most[0][0]]} would be right for {best:.1%} of those held out"
    return [kept, said]
