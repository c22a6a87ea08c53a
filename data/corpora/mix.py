"""Several sources as one corpus, each prepared separately, plus validation sets from files of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from config.errors import UserError
from config.json_text import json_sha256
from config.schema import DataSection, SourceSection, ValidationSection
from config.task import OWN
from data.corpora.corpus import Corpus, fingerprint_of_parts, lost
from data.corpora.labelled_shards import LabelledShards
from data.corpora.mixture import Mixture
from data.corpora.row_shards import RowShards, Split
from data.corpora.shards import TokenShards


def corpus_of(data: DataSection, prepare: Callable[[DataSection], Corpus]) -> Corpus:
    """The corpus of a data section, with its data.validation. prepare: makes the corpus of one source."""
    alone = replace(data, validation=())
    corpus = mixed(alone, prepare) if data.sources else prepare(alone)
    return _with_sets(corpus, data, prepare) if data.validation else corpus


def mixed(data: DataSection, prepare: Callable[[DataSection], Corpus]) -> Corpus:
    """The corpus of data.sources. prepare: makes that of one source. Raises UserError for one without a sequence."""
    parts = _with_one_numbering([prepare(section_of(data, item)) for item in data.sources])
    length = data.sequence_length
    names = tuple(str(item.name) for item in data.sources)
    samples = tuple(part.train.sequences(length) for part in parts)
    for name, count in zip(names, samples, strict=True):
        if not count:
            raise UserError(f"data.sources: {name} holds no sequence of {length} tokens; leave it out, or shorten them")
    weights = tuple(
        count * (item.epochs or 1.0) if item.weight is None else item.weight
        for item, count in zip(data.sources, samples, strict=True)
    )
    mixture = Mixture(names, samples, weights)
    notes = [
        f"data: {name}: {share:.1%} of the samples, {count:,} sequences of its own"
        for name, share, count in zip(names, mixture.shares(), samples, strict=True)
    ]
    named = dict(zip(names, parts, strict=True))
    of_parts = (f"data: {name}: {line.removeprefix('data: ')}" for name, part in named.items() for line in part.notes)
    return replace(
        parts[0],
        fingerprint=fingerprint_of_parts([[part.fingerprint for part in parts], weights]),
        content=json_sha256([part.content for part in parts]),
        train=_joined([part.train for part in parts]),
        validation=_joined([part.validation for part in parts]),
        train_documents=sum(part.train_documents for part in parts),
        validation_documents=sum(part.validation_documents for part in parts),
        source=f"data.sources={', '.join(names)}",
        counts={name: part.counts for name, part in named.items() if part.counts},
        mixture=mixture,
        validation_by_source={
            name: part.validation for name, part in named.items() if part.validation.sequences(length)
        },
        notes=(*of_parts, *notes),
    )


def section_of(data: DataSection, item: SourceSection | ValidationSection) -> DataSection:
    """The data section of one source, or of one validation set, alone."""
    of_hub = replace(data, split=item.split or data.split, name=item.configuration or data.name)
    return replace(of_hub, sources=(), validation=(), source=item.source, path=item.path, format=item.format)


def _with_sets(corpus: Corpus, data: DataSection, prepare: Callable[[DataSection], Corpus]) -> Corpus:
    """`corpus` with the sets of data.validation, which are not trained on, after its own held-out data."""
    # a tokenizer trained on the data also serves the validation sets
    tokenizer = str(corpus.tokenizer_folder) if data.tokenizer.startswith("bpe:") else data.tokenizer
    data, length = replace(data, tokenizer=tokenizer, validation_fraction=0.0), data.sequence_length
    parts = {str(item.name): prepare(section_of(data, item)) for item in data.validation}
    for name, part in parts.items():
        if not part.train.sequences(length):
            raise UserError(f"data.validation: {name} holds no sequence of {length} tokens; leave it out")
    own = dict(corpus.validation_by_source)
    if not corpus.mixture and corpus.validation.sequences(length):
        own = {OWN: corpus.validation}
    labels = tuple(dict.fromkeys([*corpus.labels, *(name for part in parts.values() for name in part.labels)]))
    sets = own | {name: _renumbered(part.train, part.labels, labels) for name, part in parts.items()}
    counts = {name: part.counts for name, part in parts.items() if part.counts}
    notes = [
        f"data: validation set {name}: {_size(part, length)}, not trained on"
        + lost(part.counts or {"skipped": sum(part.skipped.values())})
        for name, part in parts.items()
    ]
    return replace(
        corpus,
        fingerprint=fingerprint_of_parts([corpus.fingerprint, *(part.fingerprint for part in parts.values())]),
        content=json_sha256([corpus.content, *(part.content for part in parts.values())]),
        validation=_joined(list(sets.values())),
        validation_documents=corpus.validation_documents + sum(part.train_documents for part in parts.values()),
        counts=corpus.counts | ({"validation sets": counts} if counts else {}),
        validation_by_source=sets,
        notes=(*corpus.notes, *notes),
        labels=labels,
    )


def _size(part: Corpus, length: int) -> str:
    """Rows, pairs or documents of a set, and its sequences if their number differs."""
    sequences = part.train.sequences(length)
    if part.counts.get("format") == "preference":
        return f"{sequences:,} pairs"
    what = f"{part.train_documents:,} {'rows' if isinstance(part.train, RowShards) else 'documents'}"
    return what if sequences == part.train_documents else f"{what} in {sequences:,} sequences"


def _with_one_numbering(parts: list[Corpus]) -> list[Corpus]:
    """The same parts with one numbering of labels: sources in their order, and in each the order of its labels."""
    labels = tuple(dict.fromkeys(name for part in parts for name in part.labels))
    if not labels:
        return parts
    return [
        replace(
            part,
            labels=labels,
            train=_renumbered(part.train, part.labels, labels),
            validation=_renumbered(part.validation, part.labels, labels),
        )
        for part in parts
    ]


def _renumbered(split: Split, own: Sequence[str], labels: Sequence[str]) -> Split:
    """The same rows with their labels renumbered from the place in `own` to that in `labels`."""
    if not labels:
        return split
    assert isinstance(split, LabelledShards)
    return split.renumbered(np.array([labels.index(name) for name in own]))


def _joined(parts: Sequence[Split]) -> Split:
    rows = [part for part in parts if isinstance(part, RowShards)]
    if rows:
        return type(rows[0]).joined(rows)
    return TokenShards([shard for part in parts if isinstance(part, TokenShards) for shard in part.shards])
