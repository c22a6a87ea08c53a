"""The start of each document in a sequence of packed tokens, in the forms that models expect.

A packed document must not attend to the one before it: its position ids start at 0 again, and attention stops there.
Hugging Face models derive that from `position_ids` (transformers.masking_utils); flash attention's varlen kernels take
cumulative lengths of one long row instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Documents:
    """How batches keep documents apart."""

    end_of_document: int
    """[id] Token that ends a document; it belongs to the document that it ends."""
    one_row: bool = False
    """Lay a micro-batch out as a single row of all its sequences, as varlen attention needs it."""


def document_positions(input_ids: np.ndarray, end_of_document: int) -> np.ndarray:
    """Each token's distance from the start of its document, or from the start of the row. (rows, length) int64."""
    index = np.broadcast_to(np.arange(input_ids.shape[1], dtype=np.int64), input_ids.shape)
    begins = np.ones(input_ids.shape, dtype=bool)
    begins[:, 1:] = input_ids[:, :-1] == end_of_document
    return index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)


def cumulative_lengths(positions: np.ndarray) -> np.ndarray:
    """Starts of the documents in rows laid end to end, and the end of the last: (documents + 1,) int32."""
    flat = positions.reshape(-1)
    return np.append(np.flatnonzero(flat == 0), flat.size).astype(np.int32)
