"""The sequences that samples stand for, as inputs and labels: what batches are compared with.

Nothing here is taken from the loader, which lays them out in rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from data.corpora.row_shards import RowShards
from data.corpora.shards import TokenShards

IGNORED = -100
"""Label of a token that is not predicted."""


def sequences(
    shards: TokenShards | RowShards, sample: int, window: Callable[[int], np.ndarray], *, end: int | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Inputs and labels, (n,) int64 each, of everything in a sample that is attended to as a whole.

    window: (length + 1,) tokens of a sample of documents. end: the token that ends one; None: they are not kept apart.
    """
    if isinstance(shards, RowShards):
        for tokens, trained in shards.sequence(sample):
            labels = np.where(trained[1:].astype(bool), tokens[1:].astype(np.int64), IGNORED)
            yield tokens[:-1].astype(np.int64), labels
        return
    tokens = window(sample).astype(np.int64)
    inputs, labels = tokens[:-1], tokens[1:].copy()
    if end is None:
        yield inputs, labels
        return
    labels[inputs == end] = IGNORED  # nothing follows from the end of a document
    for start, stop in pairwise([0, *(np.flatnonzero(inputs == end) + 1).tolist(), len(inputs)]):
        if start < stop:
            yield inputs[start:stop], labels[start:stop]
