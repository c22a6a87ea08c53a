"""Batches whose sequences are split over ranks: each has one slice of every sequence.

Labels are shifted before they are cut, so the label of a slice's last token is the first token of the next slice.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import pad

from config.batch import WHOLE_POSITIONS, slice_length
from data.batches.loader import IGNORED_LABEL, Batch, MakeBatch, on_host
from data.corpora.row_shards import Split


def sliced(make: MakeBatch, *, rank: int, ranks: int) -> MakeBatch:
    """The same batches, with the `rank`-th of `ranks` slices of each sequence."""

    def made(shards: Split, position: int, ids: np.ndarray, mine: np.ndarray) -> Batch:
        return slice_of(make(shards, position, ids, mine), rank=rank, ranks=ranks)

    return made


def slice_of(batch: Batch, *, rank: int, ranks: int) -> Batch:
    """The `rank`-th of `ranks` equal slices of a batch's sequences. Padding at the end of sequences is a document of
    its own: token 0 without a label, positions from 0 on."""
    length = batch.input_ids.shape[-1]
    each = slice_length(length, ranks)
    padding = each * ranks - length
    positions = batch.position_ids
    if positions is None:
        positions = torch.arange(length).expand(batch.input_ids.shape)
    positions = torch.cat([positions, torch.arange(padding).expand(*positions.shape[:-1], padding)], dim=-1)
    mine = slice(rank * each, (rank + 1) * each)
    labels = pad(batch.labels, (0, padding), value=IGNORED_LABEL)[..., mine].contiguous()
    return replace(
        batch,
        input_ids=_pinned(pad(batch.input_ids, (0, padding))[..., mine]),
        labels=_pinned(labels),
        label_tokens=int((labels != IGNORED_LABEL).sum()),
        position_ids=_pinned(positions[..., mine]),
        places_of_all=batch.tokens,
        further={**batch.further, WHOLE_POSITIONS: _pinned(positions)},
    )


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return on_host(tensor.numpy().copy())
