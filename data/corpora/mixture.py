"""The samples of several sources in a global batch: still a pure function of seed and position.

The order is cut into blocks of equal size. Up to the end of any block each source has had its share of all samples so
far, rounded down (the largest source takes the rest). Within a block the sources are shuffled, and each source gives
its own samples in the order of its own epochs (`sampler.permute`).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from data.corpora.sampler import permute

BLOCK = 1024
"""[samples] Block size of up to 32 sources, and unit of that of more."""


@dataclass(frozen=True)
class Mixture:
    """Sources of samples and their shares."""

    names: tuple[str, ...]
    samples: tuple[int, ...]
    """Number of samples of each source, at least 1."""
    weights: tuple[float, ...]
    """Above 0; only their ratios matter."""

    @property
    def block_size(self) -> int:
        """[samples] The largest source's share of a block covers what rounding may give the others, one sample each."""
        return max(-(-len(self.names) * (len(self.names) - 1) // BLOCK), 1) * BLOCK

    def sample_ids(self, position: int, *, seed: int, global_size: int) -> np.ndarray:
        """Samples of one global batch, (global_size,) int64. position: global batches consumed before this one."""
        numbers = position * global_size + np.arange(global_size, dtype=np.int64)
        found = np.empty_like(numbers)
        for block in np.unique(numbers // self.block_size):
            inside = numbers // self.block_size == block
            found[inside] = self.block(int(block), seed=seed)[numbers[inside] % self.block_size]
        return found

    def source_of(self, ids: np.ndarray) -> np.ndarray:
        """The source of each sample, as an index into `names`."""
        return np.searchsorted(np.cumsum(self.samples), ids, side="right")

    def shares(self) -> list[float]:
        return [float(share) for share in self._shares()]

    @lru_cache(maxsize=8)  # noqa: B019, a mixture lives as long as its run
    def block(self, block: int, *, seed: int) -> np.ndarray:
        """The samples of one block, (block_size,) int64; cached because many batches need the same one."""
        places = self.block_size
        before, after = self._taken(block * places), self._taken((block + 1) * places)
        counts = [stop - start for start, stop in zip(before, after, strict=True)]
        slots = permute(
            np.arange(places), samples=places, seed=_seed(seed, -1), epoch=np.full(places, block, dtype=np.int64)
        )
        owners = np.repeat(np.arange(len(counts)), counts)[slots]
        found, first = np.empty(places, dtype=np.int64), 0
        for number, (size, start, stop) in enumerate(zip(self.samples, before, after, strict=True)):
            if stop > start:
                epoch, within = np.divmod(np.arange(start, stop, dtype=np.int64), size)
                own = permute(within, samples=size, seed=_seed(seed, number), epoch=epoch)
                found[owners == number] = first + own
            first += size
        return found

    def bounds(self, place: int, *, seed: int, about: int) -> tuple[int, int]:
        """The part [first, end) of the order around a place in which no source begins another pass over its samples."""
        size = self.block_size
        span = max(about // size, 1) * size
        window = place // span * span
        cuts = _passes(self, window, span, seed)
        index = int(np.searchsorted(cuts, place, side="right"))
        return int(cuts[index - 1]), int(cuts[index])

    def _taken(self, samples: int) -> list[int]:
        """How many of the first `samples` samples each source has given."""
        shares = self._shares()
        largest = max(range(len(shares)), key=shares.__getitem__)
        taken = [int(samples * share) for share in shares]
        taken[largest] += samples - sum(taken)
        return taken

    def _shares(self) -> list[Fraction]:
        exact = [Fraction(weight) for weight in self.weights]
        return [weight / sum(exact) for weight in exact]


@lru_cache(maxsize=4)
def _passes(mixture: Mixture, window: int, span: int, seed: int) -> np.ndarray:
    """The places of a window at which a source begins a pass over its samples, with the window's own two ends."""
    numbers = range(window // mixture.block_size, (window + span) // mixture.block_size)
    blocks = [mixture.block(number, seed=seed) for number in numbers]
    owners = mixture.source_of(np.concatenate(blocks))
    cuts = [np.array([0, span])]
    for number, (size, taken) in enumerate(zip(mixture.samples, mixture._taken(window), strict=True)):
        own = np.flatnonzero(owners == number)
        cuts.append(own[(taken + np.arange(len(own))) % size == 0])
    return window + np.unique(np.concatenate(cuts))


def _seed(seed: int, source: int) -> int:
    """A separate seed for the order of each source, and of the sources themselves."""
    return seed * 1_000_003 + source + 2
