"""Batches for an encoder-decoder: sources with a mask, and targets with what the decoder reads in their place.

The decoder's input is the target one place later, behind the model's `decoder_start_token_id`, as `shift_tokens_right`
of transformers makes it.
"""

from __future__ import annotations

import numpy as np
import torch

from config.schema import DataSection
from data.loader import IGNORED_LABEL, NO_SAMPLE, PADDED_TO, Batch, MakeBatch, on_host
from data.row_shards import RowShards
from data.seq2seq_rows import sides
from data.shards import TokenShards


def seq2seq_batches(data: DataSection, *, start: int, pad: int) -> MakeBatch:
    """Batches of sources and targets, both padded at their ends to the longest of this rank's.

    input_ids: (accumulation, micro, longest source), and `attention_mask` of that shape. labels and
    `decoder_input_ids`: (accumulation, micro, longest target). No place of a decoder sees those after it, so that side
    needs no mask.
    start: [id] that the decoder begins with. pad: [id] of padding.
    """

    def make(shards: TokenShards | RowShards, position: int, ids: np.ndarray, mine: np.ndarray) -> Batch:
        assert isinstance(shards, RowShards)
        real = ids[ids != NO_SAMPLE]
        rows = [_row(shards, int(sample)) for sample in mine.reshape(-1)]
        longest = _padded([len(source) for source, _ in rows], data.sequence_length)
        inputs = np.full((mine.size, longest), pad, dtype=np.int64)
        seen = np.zeros_like(inputs)
        labels = np.full(
            (mine.size, _padded([len(target) for _, target in rows], data.label_length)), IGNORED_LABEL, dtype=np.int64
        )
        shifted = np.full_like(labels, pad)
        shifted[:, 0] = start
        for row, (source, target) in enumerate(rows):
            inputs[row, : len(source)] = source
            seen[row, : max(len(source), 1)] = 1  # attention over nothing is not a number
            labels[row, : len(target)], shifted[row, 1 : len(target)] = target, target[:-1]

        def shaped(values: np.ndarray) -> torch.Tensor:
            return on_host(values).reshape(*mine.shape, -1)

        return Batch(
            position=position,
            input_ids=shaped(inputs),
            labels=shaped(labels),
            sample_ids=ids,
            label_tokens=int((labels != IGNORED_LABEL).sum()),
            label_tokens_of_all=int(shards.labels[real].sum()),
            places_of_all=int((shards.places[real] + 1).sum()),
            further={"attention_mask": shaped(seen), "decoder_input_ids": shaped(shifted)},
        )

    return make


def _row(shards: RowShards, sample: int) -> tuple[np.ndarray, np.ndarray]:
    if sample == NO_SAMPLE:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    [(ids, trained)] = shards.sequence(sample)
    return sides(np.asarray(ids, dtype=np.int64), trained)


def _padded(lengths: list[int], most: int) -> int:
    return min(-(-max(*lengths, 1) // PADDED_TO) * PADDED_TO, most)
