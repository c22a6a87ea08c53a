"""Independent implementations of a config's data order and loss scale.

On purpose, nothing here is taken from data/corpora/sampler.py, its mixture.py or the engine: an error in shared code
would never be found. The order is that of docs/data.md in plain Python integers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise

import numpy as np
import torch

from config.schema import Config, LossScaleSection, SourceSection
from data.corpora.row_shards import RowShards
from data.corpora.sequences import IGNORED as IGNORED
from data.corpora.sequences import sequences
from data.corpora.shards import TokenShards

_STRETCH, _BLOCK, _ROUNDS, _WORD = 16, 1024, 8, (1 << 64) - 1


class Order:
    """The samples of the global batch at each position, and their sequences."""

    def __init__(
        self,
        config: Config,
        shards: TokenShards | RowShards,
        *,
        end_of_document: int,
        by_source: Sequence[int] = (),
        places: Callable[[int], int] | None = None,
    ) -> None:
        """by_source: number of samples of each of data.sources; empty for a single source. places: inputs of a sample,
        if they differ from those of next-token sequences."""
        self._shards, self._length = shards, config.data.sequence_length
        self._seed, self._size = config.run.seed, config.batch.global_size
        self._batches = config.evaluate.most_batches
        self._apart, self._end = config.keeps_documents_apart, end_of_document
        self._arrays: list[np.ndarray] = []
        self._samples = shards.sequences(self._length)
        if isinstance(shards, TokenShards):
            self._arrays = [shard.array for shard in shards.shards]
            self._samples = sum(self._windows(array) for array in self._arrays)
        self._given_places = places
        self._ends = list(accumulate(by_source))
        self._mixed = Mixed(config.data.sources, by_source, seed=self._seed) if by_source else None

    def source(self, sample: int) -> int:
        """The number of the data source that a sample belongs to."""
        return next(number for number, end in enumerate(self._ends) if sample < end)

    def batch(self, position: int) -> list[int]:
        """The samples of a global batch, in order. position: global batches before it."""
        if not isinstance(self._shards, RowShards) or self._apart:
            return list(map(self._drawn, range(position * self._size, (position + 1) * self._size)))
        found: list[int] = []  # rows that are padded: those of similar length together
        while len(found) < self._size:
            first, stop = self._stretch(position * self._size + len(found))
            ends = [*range((first // self._size + 1) * self._size, stop, self._size), stop]
            cells = list(pairwise([first, *ends]))
            ids = sorted(map(self._drawn, range(first, stop)), key=self._places)
            ranks = [permuted(cell, samples=len(cells), seed=self._seed, epoch=first) for cell in range(len(cells))]
            mine = position - first // self._size
            skipped = sum(b - a for (a, b), rank in zip(cells, ranks, strict=True) if rank < ranks[mine])
            if len(cells) == 1:  # a single batch keeps its order
                ids = list(map(self._drawn, range(first, stop)))
            found += ids[skipped : skipped + cells[mine][1] - cells[mine][0]]
        return found

    def _stretch(self, place: int) -> tuple[int, int]:
        """The bounds of the places sorted together around a place: within one pass, and at most 16 batches."""
        size, longest = self._size, _STRETCH * self._size
        if self._mixed is None:
            start, end = place - place % self._samples, place - place % self._samples + self._samples
        else:
            start, end = self._mixed.without_repeats(place, longest)
        whole = start + -start % size  # where the first batch begins that lies in this pass
        borders = [start, *range(whole + longest, end, longest), end]
        return next((a, b) for a, b in pairwise(borders) if a <= place < b)

    def evaluated(self) -> Iterator[list[int]]:
        """The samples of each batch of an evaluation, if these are the validation set's: evenly spaced, or all."""
        count = self._samples if self._batches is None else min(self._samples, self._batches * self._size)
        ids = [place * self._samples // count for place in range(count)]
        for start in range(0, count, self._size):
            yield ids[start : start + self._size]

    def places(self, ids: Sequence[int]) -> int:
        """[tokens] Inputs of these samples, without padding."""
        return sum(map(self._places, ids))

    def sequences(self, ids: Sequence[int]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """A sample, inputs and labels, (n,) int64 each, of everything in these that is attended to as a whole."""
        end = self._end if self._apart else None
        for sample in ids:
            for inputs, labels in sequences(self._shards, sample, self.window, end=end):
                yield sample, torch.from_numpy(inputs), torch.from_numpy(labels)

    def _places(self, sample: int) -> int:
        if self._given_places is not None:
            return self._given_places(sample)
        if isinstance(self._shards, TokenShards):
            return self._length
        return sum(len(tokens) - 1 for tokens, _ in self._shards.sequence(sample))

    def _windows(self, array: np.ndarray) -> int:
        """Number of windows of a shard; each begins with the last token of the one before."""
        return (len(array) - 1) // self._length if len(array) else 0

    def window(self, sample: int) -> np.ndarray:
        """(length + 1,) tokens of documents end to end; the last is only a label."""
        for array in self._arrays:
            if sample < self._windows(array):
                return array[sample * self._length : (sample + 1) * self._length + 1]
            sample -= self._windows(array)
        raise IndexError(sample)

    def _drawn(self, index: int) -> int:
        """The sample at a place of the order before rows of similar length are grouped."""
        if self._mixed is not None:
            return self._mixed.sample(index)
        epoch, within = divmod(index, self._samples)
        return permuted(within, samples=self._samples, seed=self._seed, epoch=epoch)


class Mixed:
    """The order of the samples of several sources, numbered one source after another (docs/data.md, "Mixtures")."""

    def __init__(self, sources: Sequence[SourceSection], sizes: Sequence[int], *, seed: int) -> None:
        weights = [
            Fraction(size * (source.epochs or 1.0) if source.weight is None else source.weight)
            for source, size in zip(sources, sizes, strict=True)
        ]
        others = len(sizes) - 1  # each may have one sample more than its share in a block
        self._length = -(-max(len(sizes) * others, 1) // _BLOCK) * _BLOCK
        self._shares, self._sizes, self._seed = [weight / sum(weights) for weight in weights], sizes, seed * 1_000_003
        self._block = cache(self._drawn)
        self._window = cache(self._begun)

    def sample(self, index: int) -> int:
        """The sample at a place of the order."""
        block, within = divmod(index, self._length)
        return self._block(block)[within]

    def without_repeats(self, place: int, about: int) -> tuple[int, int]:
        """The bounds around a place, in whole blocks, between which no source begins another pass."""
        span = max(about // self._length, 1) * self._length
        borders = self._window(place // span * span, span)
        return next((a, b) for a, b in pairwise(borders) if a <= place < b)

    def _begun(self, start: int, span: int) -> list[int]:
        """The places in a window where a source begins a pass, and the window's two ends."""
        ends, given, found = list(accumulate(self._sizes)), self._given(start), {start, start + span}
        for place in range(start, start + span):
            owner = next(number for number, end in enumerate(ends) if self.sample(place) < end)
            found |= {place} if given[owner] % self._sizes[owner] == 0 else set()
            given[owner] += 1
        return sorted(found)

    def _drawn(self, block: int) -> list[int]:
        """The samples of a block: the next ones of each source, at shuffled places."""
        drawn, until = self._given(block * self._length), self._given((block + 1) * self._length)
        owners = [number for number in range(len(drawn)) for _ in range(until[number] - drawn[number])]
        found = []
        for place in range(self._length):
            owner = owners[permuted(place, samples=self._length, seed=self._seed + 1, epoch=block)]
            epoch, within = divmod(drawn[owner], self._sizes[owner])
            drawn[owner] += 1
            own = permuted(within, samples=self._sizes[owner], seed=self._seed + owner + 2, epoch=epoch)
            found.append(sum(self._sizes[:owner]) + own)
        return found

    def _given(self, samples: int) -> list[int]:
        """Samples each source gives of the first `samples`: its share, rounded down; the largest takes the rest."""
        given = [int(samples * share) for share in self._shares]
        given[self._shares.index(max(self._shares))] += samples - sum(given)
        return given


def permuted(index: int, *, samples: int, seed: int, epoch: int) -> int:
    """Element `index` of an epoch's permutation of [0, samples): a Feistel network with cycle walking."""
    half = max(3, ((samples - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS, person=b"mantissa-order").digest()
    keys = struct.unpack(f"<{_ROUNDS}Q", digest)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & low)
        index = left << half | right
        if index < samples:
            return index


def _mixed(value: int) -> int:
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _WORD
    return value ^ value >> 31


def unit_interval(state: int, place: int) -> float:
    """Number `place` of the SplitMix64 stream in [0, 1) that starts from a state (Steele, Lea and Flood 2014)."""
    return (_mixed(state + (place + 1) * 0x9E3779B97F4A7C15 & _WORD) >> 11) * 2.0**-53


def loss_scale(section: LossScaleSection) -> Callable[[bool], float] | None:
    """A function called step by step with whether it overflowed, giving its loss scale; None for an unsupported policy.

    DeepSpeed's rule: of the overflows since the scale last grew, all but the first few halve it, and each window
    without one, counted from the step after an overflow, doubles it from the next step on.
    """
    if section.policy == "static":
        return lambda overflow: section.initial_scale
    if section.policy != "deepspeed":
        return None
    scale, tolerated, clean = section.initial_scale, section.tolerated_overflows - 1, -1

    def of_step(overflow: bool) -> float:
        nonlocal scale, tolerated, clean
        now = scale
        clean = -1 if overflow else clean + 1
        if overflow:
            scale = scale if tolerated else max(scale / 2.0, section.minimum)
            tolerated = max(tolerated - 1, 0)
        elif clean and clean % section.window == 0:
            scale, tolerated = min(scale * 2.0, section.largest_scale), section.tolerated_overflows - 1
        return now

    return of_step
