"""Batches for an encoder-decoder: sources with a mask, and targets with the decoder's inputs.

The decoder's input is the target shifted right, after the model's `decoder_start_token_id`, as by `shift_tokens_right`
of transformers.
"""

from __future__ import annotations

import numpy as np

from config.schema import DataSection
from data.batches.loader import IGNORED_LABEL, NO_SAMPLE, Batch, MakeBatch, batch_of, of_all_ranks, padded_length
from data.corpora.row_shards import RowShards, Split
from data.sources.seq2seq_rows import sides


def seq2seq_batches(data: DataSection, *, start: int, pad: int) -> MakeBatch:
    """Batches of sources and targets, both padded at the end to this rank's longest. The decoder is causal, so that
    side needs no mask. start, pad: [id]."""

    def make(shards: Split, position: int, ids: np.ndarray, mine: np.ndarray) -> Batch:
        assert isinstance(shards, RowShards)
        rows = [_row(shards, int(sample)) for sample in mine.reshape(-1)]
        longest = padded_length([len(source) for source, _ in rows], data.sequence_length)
        longest_target = padded_length([len(target) for _, target in rows], data.label_length)
        inputs = np.full((mine.size, longest), pad, dtype=np.int64)
        seen = np.zeros_like(inputs)
        labels = np.full((mine.size, longest_target), IGNORED_LABEL, dtype=np.int64)
        shifted = np.full_like(labels, pad)
        shifted[:, 0] = start
        for row, (source, target) in enumerate(rows):
            inputs[row, : len(source)] = source
            seen[row, : max(len(source), 1)] = 1  # attention over no key is NaN
            labels[row, : len(target)], shifted[row, 1 : len(target)] = target, target[:-1]
        facts = of_all_ranks(shards, ids)
        facts["places_of_all"] += int((ids != NO_SAMPLE).sum())  # the last token of a target is an input, too
        further = {"attention_mask": seen, "decoder_input_ids": shifted}
        return batch_of(position, ids, mine, inputs, labels, further, **facts)

    return make


def _row(shards: RowShards, sample: int) -> tuple[np.ndarray, np.ndarray]:
    if sample == NO_SAMPLE:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    [(ids, trained)] = shards.sequence(sample)
    return sides(np.asarray(ids, dtype=np.int64), trained)
