"""The sequences of a global batch: a pure function of seed, position and sizes, with nothing to save.

Every epoch needs a fresh permutation of [0, samples), numbered through all epochs. Shuffling an index array takes 8
bytes per sample on every rank. A keyed bijection computes the i-th element alone instead: a Feistel network (Luby and
Rackoff 1988) on the smallest even number of bits that covers [0, samples), restricted to that range by cycle walking
(Black and Rogaway 2002): a value that leaves the range is encrypted again until it is back, at most four times on
average. The rounds use an integer mixer: the shuffle has to look random to a loss curve, not to an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from config.errors import UserError

_ROUNDS = 8
_SMALLEST_HALF_BITS = 3
"""Tiny networks reach few permutations; cycle walking within 64 values costs microseconds."""


def sample_ids(position: int, *, samples: int, seed: int, global_size: int) -> np.ndarray:
    """(global_size,) int64 samples of one global batch, in [0, samples). position: batches consumed before it."""
    if samples < 1 or position < 0:
        raise ValueError(f"no batch {position} of {samples} samples")
    index = position * global_size + np.arange(global_size, dtype=np.int64)
    epoch, within = np.divmod(index, samples)
    return permute(within, samples=samples, seed=seed, epoch=epoch)


STRETCH = 16
"""[global batches] Samples of this many batches are grouped by length."""


def grouped(
    position: int,
    lengths_of: Callable[[np.ndarray], np.ndarray],
    sample_ids_of: Callable[[int], np.ndarray],
    bounds_of: Callable[[int], tuple[int, int]],
    *,
    seed: int,
    global_size: int,
) -> np.ndarray:
    """A global batch of samples of similar length, so that little of it is padding. A pure function too.

    Samples are reordered only within the [first, end) that `bounds_of` gives around a place, such as an epoch. It is
    cut into stretches of STRETCH batches, each sorted by length and dealt out to its batches, with those cut at either
    end, in a shuffled order. lengths_of: gives those of samples. sample_ids_of: the batch drawn at a position.
    """
    size, parts = global_size, []
    place, end = position * size, (position + 1) * size
    while place < end:
        first, stop = bounds_of(place)
        aligned, span = -(-first // size) * size, STRETCH * size
        cut = aligned + max(place - aligned, 0) // span * span
        first, stop = first if cut == aligned else cut, min(stop, cut + span)
        batches = np.arange(first // size, -(-stop // size))
        ids = np.concatenate([sample_ids_of(number) for number in batches.tolist()])
        ids = ids[first - batches[0] * size :][: stop - first]
        if len(batches) > 1:
            sizes = np.minimum(stop, (batches + 1) * size) - np.maximum(first, batches * size)
            rank = permute(batches - batches[0], samples=len(batches), seed=seed, epoch=np.full_like(batches, first))
            mine = position - batches[0]
            start = int(sizes[rank < rank[mine]].sum())
            ids = ids[np.argsort(lengths_of(ids), kind="stable")][start : start + int(sizes[mine])]
        parts.append(ids)
        place = stop
    return np.concatenate(parts)


def split_for_rank(ids: np.ndarray, *, micro_size: int, rank: int, world_size: int) -> np.ndarray:
    """One rank's part of a global batch: (global_size,) -> (accumulation, micro_size). Raises UserError. Micro-batch
    number a of all ranks together is the a-th stretch of the global batch."""
    if len(ids) % (micro_size * world_size):
        raise UserError(
            f"batch.global_size={len(ids)}: not a multiple of batch.micro_size x processes = "
            f"{micro_size} x {world_size}. Change one of the three."
        )
    return ids.reshape(-1, world_size, micro_size)[:, rank]


def permute(index: np.ndarray, *, samples: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Element index[i] of the permutation of [0, samples) of epoch[i]; both (n,) int64 -> (n,) int64."""
    half_bits = max(_SMALLEST_HALF_BITS, ((samples - 1).bit_length() + 1) // 2)
    numbers, which = np.unique(epoch, return_inverse=True)
    keys = np.stack([_round_keys(seed, int(number)) for number in numbers], axis=1)[:, which]
    value = _feistel(index.astype(np.uint64), half_bits, keys)
    outside = value >= samples
    while outside.any():
        value[outside] = _feistel(value[outside], half_bits, keys[:, outside])
        outside = value >= samples
    return value.astype(np.int64)


@lru_cache(maxsize=4)
def _round_keys(seed: int, epoch: int) -> np.ndarray:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS, person=b"mantissa-order").digest()
    return np.frombuffer(digest, dtype="<u8")


def _feistel(value: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    """A bijection of [0, 2^(2 * half_bits)) for each key; value (n,) uint64, keys (rounds, n) uint64 -> (n,) uint64."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> shift, value & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << shift) | right


def mix(value: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def uniforms(key: str, count: int, *, person: bytes) -> np.ndarray:
    """(count,) float64 in [0, 1): the random stream of `key`. person: as of `splitmix`."""
    return (splitmix(key, count, person=person) >> np.uint64(11)) * 2.0**-53


def splitmix(key: str, count: int, *, person: bytes) -> np.ndarray:
    """(count,) uint64: the first numbers of SplitMix64 from a hash of `key`. person: keeps two uses of a key apart."""
    start = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8, person=person).digest(), dtype="<u8")
    with np.errstate(over="ignore"):
        return mix(start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
