"""Batches of token windows, or of sequences of rows, as tensors: this rank's share of each global batch, read ahead.

The only state worth saving is a number: the position, in global batches consumed. `restore(position)` and a run that
never stopped give the same batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from config.errors import UserError
from data.corpora.documents import Documents, cumulative_lengths, document_positions
from data.corpora.mixture import Mixture
from data.corpora.row_shards import RowShards, Split
from data.corpora.sampler import STRETCH, grouped, sample_ids, split_for_rank
from data.corpora.shards import TokenShards

IGNORED_LABEL = -100
"""Label of a position that the loss ignores; the default of torch's cross_entropy."""
NO_SAMPLE = -1
"""Sample id of a padding row in a validation batch."""


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch."""

    position: int
    """[global batches] Consumed before this one."""
    input_ids: torch.Tensor
    """(accumulation, micro, sequence_length) int64"""
    labels: torch.Tensor
    """Same shape, int64: labels[..., t] is the token after input_ids[..., t], or IGNORED_LABEL. Already shifted. Tasks
    without a label per token have their own shape (accumulation, micro, ...)."""
    sample_ids: np.ndarray
    """(global_size,) int64, the whole global batch over all ranks; NO_SAMPLE for padding rows."""
    label_tokens: int
    """[tokens] Labels on this rank that count; pairs in preference optimisation, rows with `counting_rows`."""
    label_tokens_of_all: int | None = None
    """[tokens] `label_tokens` summed over all ranks; None where labels are masked and a rank knows only its own."""
    position_ids: torch.Tensor | None = None
    """Same shape as input_ids, int64, from 0 in every document; None if attention spans the whole sequence."""
    one_row: bool = False
    """`micro_batches` concatenates the sequences of a micro-batch into one row."""
    places_of_all: int | None = None
    """[tokens] Inputs over all ranks without padding; None where there is no padding."""

    source_names: tuple[str, ...] = ()
    """The sources of a mixture; empty where there is one source."""
    labels_by_source: dict[str, int] | None = None
    """[tokens] Labels over all ranks, by source; None with one source, or if a rank knows only its own labels (see
    `counts_by_source`)."""
    sources: torch.Tensor | None = None
    """(accumulation, micro) int64: each sample's source as an index into source_names; None with one source."""
    counts_by_source: tuple[float, ...] = ()
    """label_tokens by source, in the order of source_names."""
    counts: np.ndarray | None = None
    """(accumulation, micro) int64: what each sample adds to label_tokens on this rank; None: its number of labels."""
    further: dict[str, torch.Tensor] = field(default_factory=dict)
    """More inputs of the task's objective, each (accumulation, micro, ...), in their own dtypes."""

    @property
    def tokens(self) -> int:
        """[tokens] Inputs of the global batch, without padding."""
        return self.sample_ids.size * self.input_ids.shape[-1] if self.places_of_all is None else self.places_of_all

    @property
    def counted(self) -> np.ndarray:
        """(accumulation, micro) int64: what each sample adds to label_tokens on this rank."""
        if self.counts is not None:
            return self.counts
        found: np.ndarray = (self.labels != IGNORED_LABEL).reshape(*self.labels.shape[:2], -1).sum(-1).numpy()
        return found

    def micro_batches(self, device: torch.device) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Model arguments and labels of each micro-batch, on `device`; concatenated into one row with `one_row`."""
        for index, (input_ids, labels) in enumerate(zip(self.input_ids, self.labels, strict=True)):
            inputs: dict[str, Any] = {"input_ids": input_ids}
            inputs |= {name: values[index] for name, values in self.further.items()}
            if self.position_ids is not None:
                inputs["position_ids"] = self.position_ids[index]
                if self.one_row:
                    inputs, labels = (
                        {name: ids.flatten(0, 1)[None] for name, ids in inputs.items()},
                        labels.reshape(1, -1),
                    )
                    inputs |= _lengths(self.position_ids[index])
            moved = {
                name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
                for name, value in inputs.items()
            }
            yield moved, labels.to(device, non_blocking=True)


MakeBatch = Callable[[Split, int, np.ndarray, np.ndarray], Batch]
"""A batch of a split from its position, the sample ids of the whole global batch, and this rank's ids.

These are (accumulation, micro). It must depend on these arguments only, random draws included.
"""


class Batches:
    """The endless stream of training batches of one rank; a background thread reads the next step's windows."""

    def __init__(
        self,
        shards: Split,
        *,
        sequence_length: int,
        seed: int,
        global_size: int,
        micro_size: int,
        rank: int,
        world_size: int,
        documents: Documents | None = None,
        mixture: Mixture | None = None,
        make_batch: MakeBatch | None = None,
    ) -> None:
        """make_batch: the task's own; None: labels are the next tokens."""
        self._mixture = mixture
        self._make_batch = make_batch or next_tokens(sequence_length, documents)
        self._shards, self._sequence_length, self._micro_size = shards, sequence_length, micro_size
        self._order = {"seed": seed, "global_size": global_size}
        self._rank, self._world_size = rank, world_size
        self._padded = documents is None
        self._samples = shards.sequences(sequence_length)
        if self._samples < 1:
            raise UserError(
                f"data.sequence_length={sequence_length}: the training data has {shards.tokens} tokens, not one "
                "sequence. Use more text or a smaller data.sequence_length."
            )
        # Raises here, not at the first step, if the sizes do not divide.
        split_for_rank(np.empty(global_size), micro_size=micro_size, rank=rank, world_size=world_size)
        self._drawn = lru_cache(2 * STRETCH)(self._sample_ids)
        self.position = 0  # [global batches] consumed so far
        self.record: dict[str, Any] = {}  # of how batches were made, in checkpoints beside the position
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead = self._reader.submit(self._read, 0)

    def next_step(self) -> Batch:
        """The batch at `position`, which is then incremented."""
        batch = self._ahead.result()
        self.position += 1
        self._ahead = self._reader.submit(self._read, self.position)
        return batch

    def restore(self, position: int) -> None:
        """Go to any position, [global batches] consumed, and discard what was read ahead."""
        self.position = position
        self._ahead = self._reader.submit(self._read, position)

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, position: int) -> Batch:
        if isinstance(self._shards, RowShards) and self._padded:  # rows of similar length together
            ids = grouped(position, self._shards.places, self._drawn, self._bounds, **self._order)
        else:
            ids = self._sample_ids(position)
        mine = split_for_rank(ids, micro_size=self._micro_size, rank=self._rank, world_size=self._world_size)
        batch = self._make_batch(self._shards, position, ids, mine)
        if self._mixture is None:
            return batch
        sources, names = self._mixture.source_of(mine), self._mixture.names
        knows_all = isinstance(self._shards, RowShards) or batch.label_tokens_of_all is not None
        counts = np.bincount(sources.reshape(-1), batch.counted.reshape(-1), len(names))
        return replace(
            batch,
            source_names=names,
            labels_by_source=self._by_source(ids) if knows_all else None,
            sources=on_host(sources),
            counts_by_source=tuple(counts.tolist()),
        )

    def _sample_ids(self, position: int) -> np.ndarray:
        if self._mixture is not None:
            return self._mixture.sample_ids(position, **self._order)
        return sample_ids(position, samples=self._samples, **self._order)

    def _bounds(self, place: int) -> tuple[int, int]:
        """The part of the sample stream around a position in which no sample repeats."""
        if self._mixture is not None:
            return self._mixture.bounds(place, seed=self._order["seed"], about=STRETCH * self._order["global_size"])
        return place - place % self._samples, place - place % self._samples + self._samples

    def _by_source(self, ids: np.ndarray) -> dict[str, int]:
        assert self._mixture is not None
        length, shards = self._sequence_length, self._shards
        labels = shards.labels(ids) if isinstance(shards, RowShards) else np.full(len(ids), length)
        owners = self._mixture.source_of(ids)
        return {name: int(labels[owners == number].sum()) for number, name in enumerate(self._mixture.names)}


def validation_batches(
    shards: Split,
    *,
    sequence_length: int,
    global_size: int,
    micro_size: int,
    rank: int,
    world_size: int,
    batches: int | None,
    documents: Documents | None = None,
    make_batch: MakeBatch | None = None,
) -> Iterator[Batch]:
    """The same validation batches at every call: min(all, batches * global_size) sequences, evenly spaced over the set.
    The last global batch is padded with fully masked rows, so that every rank takes part in the same collectives."""
    make_batch = make_batch or next_tokens(sequence_length, documents)
    held_out = shards.sequences(sequence_length)
    available = held_out if batches is None else min(held_out, batches * global_size)
    for position in range(-(-available // global_size)):
        index = position * global_size + np.arange(global_size, dtype=np.int64)
        ids = np.where(index < available, index * held_out // max(available, 1), NO_SAMPLE)
        mine = split_for_rank(ids, micro_size=micro_size, rank=rank, world_size=world_size)
        yield make_batch(shards, position, ids, mine)


def sample_ids_sha256(ids: np.ndarray) -> str:
    """Hex sha256 of sample ids in their order, as little-endian int64: equal for equal global batches."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i8").data).hexdigest()


def next_tokens(sequence_length: int, documents: Documents | None) -> MakeBatch:
    """Batches whose labels are the next tokens or, for rows, the trained ones among them."""

    def make(shards: Split, position: int, ids: np.ndarray, mine: np.ndarray) -> Batch:
        samples = mine.reshape(-1)
        facts: dict[str, Any] = {}
        if isinstance(shards, RowShards):
            inputs, labels, positions = _rows(shards, sequence_length, samples, padded=documents is None)
            facts = of_all_ranks(shards, ids)
        else:
            inputs, labels, positions = _windows(shards, sequence_length, samples, documents)
            if documents is None:
                facts = {"label_tokens_of_all": int((ids != NO_SAMPLE).sum()) * sequence_length}
        if documents is not None:
            facts |= {"position_ids": on_host(positions).reshape(*mine.shape, -1), "one_row": documents.one_row}
        return batch_of(position, ids, mine, inputs, labels, **facts)

    return make


def counting_rows(make: MakeBatch) -> MakeBatch:
    """`make`, with `label_tokens` counting rows that have a label rather than the labels."""

    def made(shards: Split, position: int, ids: np.ndarray, mine: np.ndarray) -> Batch:
        assert isinstance(shards, RowShards)
        batch, rows = make(shards, position, ids, mine), shards.trained_rows
        counts = np.zeros_like(mine)
        counts[mine != NO_SAMPLE] = rows(mine[mine != NO_SAMPLE])
        of_all = int(rows(ids[ids != NO_SAMPLE]).sum())
        return replace(batch, label_tokens=int(counts.sum()), label_tokens_of_all=of_all, counts=counts)

    return made


def _windows(
    shards: TokenShards, sequence_length: int, samples: np.ndarray, documents: Documents | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, the tokens after them, and positions in documents, (samples, length) each."""
    real = samples != NO_SAMPLE
    windows = np.zeros((len(samples), sequence_length + 1), dtype=np.int64)
    windows[real] = shards.read(samples[real], sequence_length)
    inputs, labels = windows[:, :-1].copy(), windows[:, 1:].copy()
    labels[~real] = IGNORED_LABEL
    if documents is None:
        return inputs, labels, np.zeros_like(inputs)
    # The first token of a document does not follow from the document before it.
    labels[inputs == documents.end_of_document] = IGNORED_LABEL
    return inputs, labels, document_positions(inputs, documents.end_of_document)


PADDED_TO = 8
"""[tokens] Padded sequences are multiples of this, for tensor cores."""


def _rows(
    shards: RowShards, sequence_length: int, samples: np.ndarray, *, padded: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, labels and positions of sequences of whole rows, (samples, length) each, padded at the end. padded: pad
    to this rank's longest, since attention is causal; else to `sequence_length`, as one more document."""
    length = sequence_length
    if padded:
        length = padded_length(shards.places(samples[samples != NO_SAMPLE]), sequence_length)
    inputs = np.zeros((len(samples), length), dtype=np.int64)
    labels = np.full_like(inputs, IGNORED_LABEL)
    positions = np.zeros_like(inputs)
    for row, sample in enumerate(samples):
        start = 0
        for tokens, trained in shards.sequence(int(sample)) if sample != NO_SAMPLE else ():
            place = slice(start, start + len(tokens) - 1)
            inputs[row, place] = tokens[:-1]
            labels[row, place] = np.where(trained[1:], tokens[1:].astype(np.int64), IGNORED_LABEL)
            positions[row, place] = np.arange(len(tokens) - 1)
            start = place.stop
        positions[row, start:] = np.arange(length - start)
    return inputs, labels, positions


def of_all_ranks(shards: RowShards, ids: np.ndarray) -> dict[str, Any]:
    """Labels and inputs of a whole global batch of rows, as `Batch` names them."""
    real = ids[ids != NO_SAMPLE]
    return {"label_tokens_of_all": int(shards.labels(real).sum()), "places_of_all": int(shards.places(real).sum())}


def padded_length(lengths: Sequence[int] | np.ndarray, most: int) -> int:
    """The length that sequences of a batch are padded to: the longest of these, a multiple of PADDED_TO or `most`."""
    return min(-(-int(np.max(lengths, initial=1)) // PADDED_TO) * PADDED_TO, most)


def batch_of(
    position: int,
    ids: np.ndarray,
    mine: np.ndarray,
    inputs: np.ndarray,
    labels: np.ndarray,
    further: Mapping[str, np.ndarray] | None = None,
    **facts: Any,
) -> Batch:
    """The batch made of arrays with a row for each of `mine`, in order. facts: other fields of the batch."""

    def shaped(values: np.ndarray) -> torch.Tensor:
        return on_host(values).reshape(*mine.shape, *values.shape[1:])

    return Batch(
        position=position,
        input_ids=shaped(inputs),
        labels=shaped(labels),
        sample_ids=ids,
        further={name: shaped(values) for name, values in (further or {}).items()},
        **{"label_tokens": int((labels != IGNORED_LABEL).sum()), **facts},
    )


def on_host(values: np.ndarray) -> torch.Tensor:
    """Pinned memory if there is a GPU: a copy from pageable memory waits for all earlier work of the device."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def _lengths(positions: torch.Tensor) -> dict[str, Any]:
    """Arguments of varlen attention, computed on the host: otherwise each layer would compute them and synchronise."""
    starts = cumulative_lengths(positions.numpy())
    lengths, longest = on_host(starts), int(np.diff(starts).max())
    return {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": longest, "max_length_k": longest}
