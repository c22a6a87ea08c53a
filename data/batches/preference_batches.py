"""Batches of pairs of answers: a sample is a pair, whose two sides go through the model together.

Sequences are padded at the end, which needs no mask with causal attention. The length of a batch is one of a few, so
that the log-probabilities of the initial weights, computed once per length, are bit for bit those of a training step:
the same row in a batch of another shape may be rounded differently.
"""

from __future__ import annotations

import numpy as np

from data.batches.loader import IGNORED_LABEL, NO_SAMPLE, Batch, MakeBatch, batch_of, of_all_ranks, padded_length
from data.corpora.corpus import Corpus
from data.corpora.row_shards import RowShards, Split

REFERENCE = "reference"
"""Column of (pairs, lengths, 2) float32: log-probabilities of both answers [nats] at each of the lengths, under the
initial weights; NaN where the pair is longer."""
_HALVINGS = 2


def lengths_of(longest: int, most: int) -> tuple[int, ...]:
    """The lengths that batches are padded to, ascending: a quarter, half and all of the longest sequence. most: the
    limit, data.sequence_length, for which the model has positions."""
    return tuple(sorted({padded_length([-(-longest >> halvings)], most) for halvings in range(_HALVINGS + 1)}))


def lengths_of_corpus(corpus: Corpus) -> tuple[int, ...]:
    """`lengths_of` the longest row in a corpus of pairs, including held-out pairs."""
    splits = [split for split in (corpus.train, corpus.validation) if isinstance(split, RowShards)]
    return lengths_of(max(int(split.longest.max(initial=1)) for split in splits), splits[0].sequence_length)


def batches_of_pairs(lengths: tuple[int, ...]) -> MakeBatch:
    """Batches padded to one of these lengths.

    input_ids and `targets`: (accumulation, micro, 2, length) int64, the chosen side first; a target is the next token
    where it belongs to an answer, else IGNORED_LABEL. labels: (accumulation, micro), 0 for a pair and IGNORED_LABEL for
    padding, so that a batch counts pairs. `reference`: (accumulation, micro, 2) float32, if the shards have it.
    """

    def make(shards: Split, position: int, ids: np.ndarray, mine: np.ndarray) -> Batch:
        assert isinstance(shards, RowShards)
        samples = mine.reshape(-1)
        own = samples[samples != NO_SAMPLE]
        number = int(np.searchsorted(lengths, shards.longest[own].max(initial=1)))
        inputs = np.zeros((mine.size, 2, lengths[number]), dtype=np.int64)
        targets = np.full_like(inputs, IGNORED_LABEL)
        for row, sample in enumerate(samples):
            for side, (tokens, trained) in enumerate(shards.sequence(int(sample)) if sample != NO_SAMPLE else ()):
                inputs[row, side, : len(tokens) - 1] = tokens[:-1]
                labels = np.where(trained[1:], tokens[1:].astype(np.int64), IGNORED_LABEL)
                targets[row, side, : len(tokens) - 1] = labels
        further: dict[str, np.ndarray] = {"targets": targets}
        if REFERENCE in shards.columns:
            values = np.zeros((mine.size, 2), dtype=np.float32)
            values[samples != NO_SAMPLE] = shards.columns[REFERENCE][own, number]
            further[REFERENCE] = values
        labels = np.where(samples == NO_SAMPLE, IGNORED_LABEL, 0)
        facts = of_all_ranks(shards, ids) | {"label_tokens_of_all": int((ids != NO_SAMPLE).sum())}
        return batch_of(position, ids, mine, inputs, labels, further, **facts)

    return make
