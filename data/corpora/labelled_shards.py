"""Prepared rows with labels on disk, and as batches for an encoder.

The files are those of `row_shards`, one row per sequence. A shard has `tokens` (n,) and `ends` (rows,), and also
`types` (n,) uint8, 1 for the second of two texts, and `targets`: (rows,) int32 numbers of labels, (rows,) float64, or
(n,) int32, IGNORED_LABEL where no word begins. A row of n tokens takes n places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.batches.loader import IGNORED_LABEL, NO_SAMPLE, Batch, MakeBatch, batch_of, of_all_ranks, padded_length
from data.corpora.row_shards import RowShards


class Labelled(NamedTuple):
    """One prepared row."""

    tokens: np.ndarray
    """(n,) ids"""
    types: np.ndarray
    """(n,) 1 for the second of two texts, else 0"""
    target: np.ndarray
    """() number of the label, or the value to predict; (n,) for labels of words"""


class LabelledShards(RowShards):
    """The rows of one split."""

    _only_labels = 0

    @property
    def by_token(self) -> bool:
        """Whether words have labels."""
        return bool(self._shards) and len(self._shards[0]["targets"]) != len(self._shards[0]["ends"])

    def labelled(self, number: int) -> Labelled:
        """One row, in the order of the source."""
        shard, index, part = self.found(number)
        target = shard["targets"][part if self.by_token else index]
        return Labelled(shard["tokens"][part], shard["types"][part], np.asarray(target))

    def renumbered(self, numbers: np.ndarray) -> LabelledShards:
        """These rows with renumbered labels. numbers: (labels,) int64, the new number by the number on disk."""
        order = {"rows": self._rows, "ends": self._ends, "lengths": self._lengths, "labels": self._labels}
        targets = [np.asarray(shard["targets"]) for shard in self._shards]
        changed = [np.where(each == IGNORED_LABEL, IGNORED_LABEL, numbers[np.maximum(each, 0)]) for each in targets]
        shards = [{**shard, "targets": each} for shard, each in zip(self._shards, changed, strict=True)]
        return LabelledShards(shards, order, sequence_length=self.sequence_length)


def encoder_batches(
    labels: Sequence[int] | None, *, sequence_length: int, pad: int, takes_types: bool, by_token: bool
) -> MakeBatch:
    """Batches of whole rows, padded at the end to the longest on this rank, with an attention mask.

    labels: the model's label for each number on disk; None for regression, whose values go into the batch's
    `further["targets"]` (accumulation, micro, 1) FP32, while `labels` says which of them count. by_token: words have
    labels; Batch.labels is then as long as the inputs, else (accumulation, micro, 1). pad: [id] of padding.
    """
    numbers = None if labels is None else np.asarray(labels, dtype=np.int64)

    def make(shards: object, position: int, ids: np.ndarray, mine: np.ndarray) -> Batch:
        assert isinstance(shards, LabelledShards)
        samples = mine.reshape(-1)
        length = padded_length(shards.places(samples[samples != NO_SAMPLE]), sequence_length)
        inputs = np.full((mine.size, length), pad, dtype=np.int64)
        seen, types = np.zeros_like(inputs), np.zeros_like(inputs)
        found = np.full((mine.size, length if by_token else 1), IGNORED_LABEL, dtype=np.int64)
        targets = np.zeros((mine.size, 1), dtype=np.float32)
        for row, sample in enumerate(samples):
            if sample == NO_SAMPLE:
                seen[row, 0] = 1  # attention over no key is NaN
                continue
            [number] = shards.rows_of(int(sample))
            item = shards.labelled(number)
            place = slice(len(item.tokens))
            inputs[row, place], types[row, place], seen[row, place] = item.tokens, item.types, 1
            if numbers is None:
                targets[row, 0], found[row, 0] = item.target, 0
            elif by_token:
                counts = item.target != IGNORED_LABEL
                found[row, place] = np.where(counts, numbers[np.where(counts, item.target, 0)], IGNORED_LABEL)
            else:
                found[row, 0] = numbers[item.target]
        further: dict[str, np.ndarray] = {"attention_mask": seen}
        further |= {"token_type_ids": types} if takes_types else {}
        further |= {"targets": targets} if numbers is None else {}
        return batch_of(position, ids, mine, inputs, found, further, **of_all_ranks(shards, ids))

    return make
