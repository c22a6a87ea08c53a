"""The sequences in a sample as inputs and labels, for comparison with batches; independent of the loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from data.corpora.row_shards import RowShards, Split

IGNORED = -100
"""Label of a token that is not predicted."""


def sequences(
    shards: Split, sample: int, window: Callable[[int], np.ndarray], *, end: int | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Inputs and labels, (n,) int64 each, of every part of a sample within which tokens attend to each other. window:
    (length + 1,) tokens of a sample of documents. end: the token that ends one; None: they are not kept apart."""
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
