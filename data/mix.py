"""Several sources as one corpus: each prepared by itself, with its own validation set and its share of the samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from config.errors import UserError
from config.schema import DataSection, SourceSection
from data.corpus import Corpus
from data.labelled_shards import LabelledShards
from data.mixture import Mixture
from data.row_shards import RowShards
from data.shards import TokenShards


def mixed(data: DataSection, prepare: Callable[[DataSection], Corpus]) -> Corpus:
    """The corpus of data.sources. prepare: of one source.

    Raises UserError for a source without one whole sequence, and what `prepare` raises.
    """
    parts = _with_one_numbering([prepare(section_of(data, item)) for item in data.sources])
    length = data.sequence_length
    names = tuple(str(item.name) for item in data.sources)
    samples = tuple(part.train.sequences(length) for part in parts)
    for name, count in zip(names, samples, strict=True):
        if not count:
            raise UserError(f"data.sources: {name} holds no sequence of {length} tokens; leave it out, or shorten them")
    weights = tuple(_weight(item, count) for item, count in zip(data.sources, samples, strict=True))
    mixture = Mixture(names, samples, weights)
    identity = json.dumps([[part.fingerprint for part in parts], weights])
    notes = [
        f"data: {name}: {share:.1%} of the samples, {count:,} sequences of its own"
        for name, share, count in zip(names, mixture.shares(), samples, strict=True)
    ]
    first = parts[0]
    return replace(
        first,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:20],
        train=_joined([part.train for part in parts]),
        validation=_joined([part.validation for part in parts]),
        train_documents=sum(part.train_documents for part in parts),
        validation_documents=sum(part.validation_documents for part in parts),
        train_bytes=sum(part.train_bytes for part in parts),
        validation_bytes=sum(part.validation_bytes for part in parts),
        source=f"data.sources={', '.join(names)}",
        counts={name: part.counts for name, part in zip(names, parts, strict=True) if part.counts},
        mixture=mixture,
        validation_by_source={
            name: part.validation for name, part in zip(names, parts, strict=True) if part.validation.sequences(length)
        },
        notes=(*(line for part in parts for line in part.notes), *notes),
    )


def section_of(data: DataSection, item: SourceSection) -> DataSection:
    """The data section of one source alone."""
    return replace(data, sources=(), source=item.source, path=item.path, format=item.format)


def _weight(item: SourceSection, samples: int) -> float:
    return item.weight if item.weight is not None else samples * (item.epochs or 1.0)


def _with_one_numbering(parts: list[Corpus]) -> list[Corpus]:
    """The same parts, their labels numbered alike: in the order of the sources, and in each as its rows have them."""
    labels = tuple(dict.fromkeys(name for part in parts for name in part.labels))
    if not labels:
        return parts

    def renumbered(split: TokenShards | RowShards, part: Corpus) -> TokenShards | RowShards:
        assert isinstance(split, LabelledShards)
        return split.renumbered(np.array([labels.index(name) for name in part.labels]))

    return [
        replace(
            part,
            labels=labels,
            train=renumbered(part.train, part),
            validation=renumbered(part.validation, part),
        )
        for part in parts
    ]


def _joined(parts: Sequence[TokenShards | RowShards]) -> TokenShards | RowShards:
    rows = [part for part in parts if isinstance(part, RowShards)]
    if rows:
        return type(rows[0]).joined(rows)
    return TokenShards([shard for part in parts if isinstance(part, TokenShards) for shard in part.shards])
