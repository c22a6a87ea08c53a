"""Batches of token windows as tensors: this rank's share of each global batch, read one step ahead.

Nothing here has state worth saving but a number: the position, in global batches consumed. `restore(position)` and a
run that never stopped give the same batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from config.errors import UserError
from data.sampler import rank_sample_ids, sample_ids, split_for_rank
from data.shards import TokenShards

IGNORED_LABEL = -100
"""Label of a position that takes no part in the loss; the default of torch's cross_entropy."""
NO_SAMPLE = -1
"""Sample id of a row that only fills up a validation batch."""


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch."""

    position: int
    """[global batches] Consumed before this one."""
    input_ids: torch.Tensor
    """(accumulation, micro, sequence_length) int64"""
    labels: torch.Tensor
    """Same shape, int64: labels[..., t] is the token after input_ids[..., t], or IGNORED_LABEL. Already shifted."""
    sample_ids: np.ndarray
    """(global_size,) int64, the whole global batch over all ranks; NO_SAMPLE for rows that only fill up."""
    label_tokens: int
    """[tokens] Labels on this rank that count."""


class Batches:
    """The endless stream of training batches of one rank.

    Raises UserError when the shards hold no sequence of this length or the sizes do not divide. One background thread
    reads the next step's windows; what it raises, `next_step` raises.
    """

    def __init__(
        self,
        shards: TokenShards,
        *,
        sequence_length: int,
        seed: int,
        global_size: int,
        micro_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._shards, self._sequence_length, self._seed = shards, sequence_length, seed
        self._global_size, self._micro_size = global_size, micro_size
        self._rank, self._world_size = rank, world_size
        self._samples = shards.sequences(sequence_length)
        if self._samples < 1:
            raise UserError(
                f"data.sequence_length={sequence_length}: the training data has {shards.tokens} tokens, not one "
                "sequence. Use more text or a smaller data.sequence_length."
            )
        # Sizes that do not divide are told here, not by the first step.
        rank_sample_ids(
            0,
            samples=self._samples,
            seed=seed,
            global_size=global_size,
            micro_size=micro_size,
            rank=rank,
            world_size=world_size,
        )
        self._position = 0
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead = self._read_ahead(0)

    @property
    def position(self) -> int:
        """[global batches] Consumed so far."""
        return self._position

    @property
    def samples(self) -> int:
        """[sequences] In one epoch."""
        return self._samples

    def next_step(self) -> Batch:
        """The batch at `position`, which then moves on by one."""
        batch = self._ahead.result()
        self._position += 1
        self._ahead = self._read_ahead(self._position)
        return batch

    def restore(self, position: int) -> None:
        """Go to any position, [global batches] consumed. What was read ahead is discarded."""
        self._position = position
        self._ahead = self._read_ahead(position)

    def close(self) -> None:
        """End the background thread."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _read_ahead(self, position: int) -> Future[Batch]:
        return self._reader.submit(self._read, position)

    def _read(self, position: int) -> Batch:
        ids = sample_ids(position, samples=self._samples, seed=self._seed, global_size=self._global_size)
        mine = split_for_rank(ids, micro_size=self._micro_size, rank=self._rank, world_size=self._world_size)
        return _make_batch(self._shards, self._sequence_length, position, ids, mine)


def validation_batches(
    shards: TokenShards,
    *,
    sequence_length: int,
    global_size: int,
    micro_size: int,
    rank: int,
    world_size: int,
    batches: int,
) -> Iterator[Batch]:
    """The same validation batches at every call: min(all, batches * global_size) sequences, evenly spaced over the set.

    The first so many would come from a handful of documents and say little about the rest.
    The last global batch is filled up with rows that are masked throughout, so that every rank has the same shapes and
    takes part in the same collectives. Yields nothing when there is no sequence.
    """
    held_out = shards.sequences(sequence_length)
    available = min(held_out, batches * global_size)
    for position in range(-(-available // global_size)):
        index = position * global_size + np.arange(global_size, dtype=np.int64)
        ids = np.where(index < available, index * held_out // max(available, 1), NO_SAMPLE)
        mine = split_for_rank(ids, micro_size=micro_size, rank=rank, world_size=world_size)
        yield _make_batch(shards, sequence_length, position, ids, mine)


def sample_ids_sha256(ids: np.ndarray) -> str:
    """Hex sha256 of sample ids in their order, as little-endian int64: equal for equal global batches."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i8").data).hexdigest()


def _make_batch(shards: TokenShards, sequence_length: int, position: int, ids: np.ndarray, mine: np.ndarray) -> Batch:
    real = mine.reshape(-1) != NO_SAMPLE
    windows = np.zeros((mine.size, sequence_length + 1), dtype=np.int64)
    windows[real] = shards.read(mine.reshape(-1)[real], sequence_length)
    labels = windows[:, 1:].copy()
    labels[~real] = IGNORED_LABEL
    shape = (*mine.shape, sequence_length)
    return Batch(
        position=position,
        input_ids=torch.from_numpy(windows[:, :-1].copy()).reshape(shape),
        labels=torch.from_numpy(labels).reshape(shape),
        sample_ids=ids,
        label_tokens=int(real.sum()) * sequence_length,
    )
