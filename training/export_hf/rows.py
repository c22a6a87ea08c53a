"""Rows of tokens to compare two models on: of the run's own data, of a config's, or of a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from config.errors import UserError
from config.load import load_config
from config.schema import Config
from data.corpus import Corpus, open_corpus
from data.row_shards import RowShards
from data.seq2seq_rows import sides
from training.tasks.task import prepare

ROWS = 8
"""How many rows are read, unless told."""
_TOKENS = 512
"""Of each row at most so many, and no more than a sequence of the run has: the model knows no further positions."""
_CONFIGS = (".yaml", ".yml")
_COMPRESSED = (".gz", ".zst")


def rows_of_run(folder: Path, config: Config, count: int = ROWS) -> list[torch.Tensor]:
    """Held-out rows of a prepared corpus, or training rows where none are held out; none where it is gone.

    Each is (1, n) int64.
    """
    try:
        return rows_of(open_corpus(folder, verify=False), count, longest=config.data.sequence_length)
    except UserError:
        return []


def pairs_of_run(folder: Path, config: Config, count: int = ROWS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same for an encoder-decoder: sources and targets, (1, n) and (1, m) int64."""
    try:
        corpus = open_corpus(folder, verify=False)
    except UserError:
        return []
    for split in (corpus.validation, corpus.train):
        assert isinstance(split, RowShards)
        both = [sides(*split.row(int(number))) for number in _spread(split.rows, count)]
        if both:
            longest = min(config.data.longest, _TOKENS)
            return [(_as_row(source[:longest]), _as_row(target[:longest])) for source, target in both]
    return []


def rows_of_data(data: str, config: Config, tokenizer: Path, count: int = ROWS) -> list[torch.Tensor]:
    """Rows of a config's data, or of a file, as the run of `config` would see them, under its tokenizer.

    data: a run config (.yaml), or a file or glob of the run's kind of rows; text files are read as documents. Each row
    is (1, n) int64. Raises UserError when the data cannot be prepared or hold no row.
    """
    if Path(data).suffix in _CONFIGS:
        chosen = load_config(Path(data), [], None)
    else:
        kind = _kind(data)
        section = dataclasses.replace(
            config.data, path=data, source=kind, sources=(), name=None, document_separator=None
        )
        chosen = dataclasses.replace(config, data=section, task="pretrain" if kind == "text" else config.task)
        if not Path(data).expanduser().exists():
            raise UserError(f"--compare-logits {data}: is not there; give a run config or a file of rows or text")
    section = dataclasses.replace(chosen.data, tokenizer=str(tokenizer))
    if Path(data).suffix not in _CONFIGS:
        section = dataclasses.replace(section, validation_fraction=0.0)
    corpus = prepare(dataclasses.replace(chosen, data=section), progress=False)
    rows = rows_of(corpus, count, longest=config.data.sequence_length)
    if not rows:
        raise UserError(f"--compare-logits {data}: holds no row; give more of it")
    return rows


def rows_of(corpus: Corpus, count: int, *, longest: int) -> list[torch.Tensor]:
    """At most `count` rows, evenly spread over the held-out split, or over the training split where that is empty."""
    longest = min(longest, _TOKENS)
    for split in (corpus.validation, corpus.train):
        if isinstance(split, RowShards):
            numbers = _spread(split.rows, count)
            rows = [split.row(int(number))[0][:longest] for number in numbers]
        else:
            length = min(longest, split.tokens - 1)
            numbers = _spread(split.sequences(length) if length > 0 else 0, count)
            rows = [window[:length] for window in split.read(numbers, length)] if len(numbers) else []
        if rows:
            return [_as_row(row) for row in rows]
    return []


def _as_row(ids: np.ndarray) -> torch.Tensor:
    return torch.as_tensor(ids.astype("int64"))[None]


def _spread(available: int, count: int) -> Any:
    taken = min(available, count)
    return np.arange(taken, dtype=np.int64) * available // max(taken, 1)


def _kind(path: str) -> Any:
    suffixes = [suffix for suffix in Path(path).suffixes if suffix not in _COMPRESSED]
    known = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
    return known.get(suffixes[-1] if suffixes else "", "text")
