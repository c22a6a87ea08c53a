"""Holds out the end of the longest document if no document was drawn for validation, as with a single text file.

This happens when a corpus is opened and changes nothing on disk. Held out are the last whole sequences of that
document: `data.validation_fraction` of all tokens, at least one sequence, never more than half the document. Training
stops at the token before, on a sequence border, so no token is in both splits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from data.corpora.corpus import Corpus
from data.corpora.shards import Shard, TokenShards

TAIL = "+tail"
"""Suffix of the fingerprint of a corpus whose training data was cut here."""


def hold_out_tail(corpus: Corpus, *, fraction: float, sequence_length: int) -> Corpus:
    """`corpus` with the end of its longest document held out; unchanged if that is too short."""
    assert isinstance(corpus.train, TokenShards), "rows are held out whole"
    start, end = _longest_document(corpus.train, corpus.end_of_document)
    wanted = max(1, round(fraction * corpus.train.tokens / sequence_length))
    sequences = min(wanted, ((end - start) // 2 - 1) // sequence_length)
    if sequences < 1:
        return corpus
    # Training keeps whole sequences of the shard being cut: each takes one token more than its length.
    cut = end - sequences * sequence_length - 1
    base = max(first for first in _starts(corpus.train).tolist() if first <= cut)
    cut = max(start, base + (cut - base - 1) // sequence_length * sequence_length + 1)
    return replace(
        corpus,
        fingerprint=corpus.fingerprint + TAIL,
        train=TokenShards([*_between(corpus.train, 0, cut), *_between(corpus.train, end, corpus.train.tokens)]),
        validation=TokenShards(_between(corpus.train, cut, end)),
        tail_tokens=end - cut,
    )


def _longest_document(shards: TokenShards, end_of_document: int) -> tuple[int, int]:
    """First token and end of the longest document (the first if several), counted through all shards."""
    longest, start = (0, 0), 0
    for shard, base in zip(shards.shards, _starts(shards).tolist(), strict=True):
        for position in np.flatnonzero(shard.array == end_of_document):
            end = base + int(position) + 1
            longest = max(longest, (start, end), key=lambda found: found[1] - found[0])
            start = end
    return longest


def _starts(shards: TokenShards) -> np.ndarray:
    """The global index of each shard's first token."""
    return np.cumsum([0, *(shard.tokens for shard in shards.shards)])[:-1]


def _between(shards: TokenShards, start: int, end: int) -> list[Shard]:
    """The tokens from `start` up to `end` as parts of the shards' files."""
    parts = []
    for shard, base in zip(shards.shards, _starts(shards).tolist(), strict=True):
        first, last = max(start - base, 0), min(end - base, shard.tokens)
        if first < last:
            offset = shard.offset + first * np.dtype(shard.dtype).itemsize
            parts.append(replace(shard, tokens=last - first, offset=offset))
    return parts
