"""Show rows as they will be trained: `python -m data.show --config FILE [--rows 3] [key.sub=value ...]`.

Prepares the data of a run config, if need be, and prints the first rows with the tokens that have labels in colour (on
a terminal; elsewhere between brackets), then the totals. Starts no training and needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from config.cli import Arguments, entry_point
from config.load import load_config
from config.options import positive_int
from config.printable import printable
from config.schema import SAMPLING_TASKS, Config, DataSection
from config.task import settle_task
from data.batches.loader import IGNORED_LABEL
from data.batches.masking import masking_of
from data.corpora.corpus import Corpus, labels_of
from data.corpora.labelled_shards import LabelledShards
from data.corpora.mix import corpus_of
from data.corpora.row_shards import RowShards
from data.rows.prepare_labelled import prepare_labelled
from data.rows.prepare_prompts import prepare_prompts
from data.rows.prepare_rows import prepare_rows
from data.text.prepare import prepare
from data.text.tokenizer import load_tokenizer

_ON, _OFF = ("\x1b[32m", "\x1b[0m"), ("[", "]")
_LONGEST = 4000
"""[tokens] At most this much is printed of a row, or of a sequence of documents."""


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    config = settle_task(load_config(options.config, options.overrides, None))
    corpus = _prepared(config)
    for line in shown_rows(config, corpus, options.rows, colour=sys.stdout.isatty()):
        print(line)
    return 0


def _prepared(config: Config) -> Corpus:
    def of(data: DataSection) -> Corpus:
        if config.task == "classify":
            return prepare_labelled(data, progress=True)
        if config.task in SAMPLING_TASKS:
            return prepare_prompts(data, progress=True)
        if config.learns_rows:
            return prepare_rows(data, progress=True)
        return prepare(data, progress=True, for_encoder=config.task == "mlm")

    corpus = corpus_of(config.data, of)
    if config.task == "classify" and config.classify.kind != "regression":
        labels_of(corpus, config.classify.labels, config.data)
    return corpus


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Arguments("python -m data.show", __doc__)
    parser.add_argument("--config", type=Path, required=True, help="run config")
    parser.add_argument("--rows", type=positive_int, default=3, help="how many rows to print (default 3)")
    parser.add_argument("overrides", nargs="*", help="key.sub=value, as for train.py")
    return parser.parse_intermixed_args(arguments)


def shown_rows(config: Config, corpus: Corpus, rows: int, *, colour: bool) -> list[str]:
    """The first rows, then the totals, as lines of text. Raises UserError if `mlm` has no token to hide."""
    tokenizer = load_tokenizer(corpus.tokenizer_folder)
    marks = _ON if colour else _OFF
    if isinstance(corpus.train, LabelledShards):
        found = [*_labelled(corpus, corpus.train, tokenizer, rows, marks)]
    else:
        found = [*_trained(config, corpus, tokenizer, rows, marks)]
    counts = ", ".join(f"{key} {value:,}" for key, value in corpus.counts.items() if isinstance(value, int))
    return [*found, "---", *corpus.notes, f"data: {counts or _totals(config, corpus)}"]


def _totals(config: Config, corpus: Corpus) -> str:
    """Sizes of a corpus without row counts: of documents, or of several sources."""
    sequence_length, documents = config.data.sequence_length, f"{corpus.train_documents:,} documents"
    labels = f"{corpus.train.label_tokens(sequence_length):,}"
    if config.task == "mlm":
        chosen = f"{config.mlm.probability:.0%} of the {'words' if config.mlm.whole_word else 'tokens'}"
        return f"{documents}, {labels} tokens; labels are {chosen}, others in every epoch"
    if config.task == "dpo":
        return f"{corpus.train.sequences(sequence_length):,} pairs of all sources, {labels} labels"
    if config.learns_rows or config.task == "classify":
        return f"{corpus.train_documents:,} rows of all sources, {labels} labels"
    if config.keeps_documents_apart:
        return f"{documents}, {labels} tokens; all but the first of each document are labels"
    return f"{documents}, {labels} labels, all tokens are labels"


def _trained(config: Config, corpus: Corpus, tokenizer: Any, rows: int, marks: tuple[str, str]) -> Iterator[str]:
    """Rows, pairs or sequences, with marks around the parts that are labels."""
    sides = ("chosen", "rejected") if config.task == "dpo" else ("",)
    for index, (ids, trained) in enumerate(_first(config, corpus, rows * len(sides))):
        side = sides[index % len(sides)]
        edges = np.flatnonzero(np.diff(trained.astype(np.int8))) + 1
        parts = zip(np.split(ids[:_LONGEST], edges), np.split(trained[:_LONGEST], edges), strict=True)
        pieces = [(printable(str(tokenizer.decode(part))), bool(on.any())) for part, on in parts if len(part)]
        number = f"{index // len(sides) + 1}{side and f', {side}'}"
        yield f"--- {number}: {len(ids):,} tokens, {int(trained.sum()):,} of them labels"
        yield "".join(f"{marks[0]}{piece}{marks[1]}" if on else piece for piece, on in pieces)


def _labelled(
    corpus: Corpus, train: LabelledShards, tokenizer: Any, rows: int, marks: tuple[str, str]
) -> Iterator[str]:
    """Rows with their labels: after the text, or after each word that has one."""

    def said(target: np.ndarray) -> str:
        name = corpus.labels[int(target)] if corpus.labels else f"{float(target):g}"
        return f" {marks[0]}{printable(name)}{marks[1]}"

    for number in range(min(rows, train.rows)):
        item = train.labelled(number)
        labels = item.target.reshape(-1)
        yield f"--- {number + 1}: {len(item.tokens):,} tokens, {int((labels != IGNORED_LABEL).sum()):,} labels"
        if not item.target.ndim:
            yield printable(str(tokenizer.decode(item.tokens[:_LONGEST]))) + said(item.target)
            continue
        yield " ".join(
            printable(str(tokenizer.decode(part)).strip())
            + (said(labels[start]) if labels[start] != IGNORED_LABEL else "")
            for start, part in _words(item.tokens[:_LONGEST], labels, set(tokenizer.all_special_ids))
        )


def _words(tokens: np.ndarray, labels: np.ndarray, special: set[int]) -> Iterator[tuple[int, np.ndarray]]:
    """The place and tokens of each word or special token; a word's first token has its label."""
    first = {place for place, token in enumerate(tokens) if labels[place] != IGNORED_LABEL or int(token) in special}
    starts = sorted(first | {0})
    for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        yield start, tokens[start:end]


def _first(config: Config, corpus: Corpus, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The first rows or windows: tokens before any is hidden, and which of them are labels the first time."""
    train, length = corpus.train, config.data.sequence_length
    if isinstance(train, RowShards):
        pairs = (train.row(number) for number in range(min(rows, train.rows)))
        return [(np.asarray(ids), np.asarray(trained, dtype=bool)) for ids, trained in pairs]
    numbers = np.arange(min(rows, train.sequences(length)))
    if config.task != "mlm":
        apart = corpus.end_of_document if config.keeps_documents_apart else None  # whose next token is no label
        return [(ids, np.append(False, ids[:-1] != apart)) for ids in train.read(numbers, length)]
    batch = masking_of(config, corpus)(train, 0, numbers, numbers[None])
    seen, labels = batch.input_ids[0].numpy(), batch.labels[0].numpy()
    return [(np.where(of != IGNORED_LABEL, of, ids), of != IGNORED_LABEL) for ids, of in zip(seen, labels, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
