"""Mixtures: exact shares, every sample once an epoch, the same order whatever the batch size."""

from collections import Counter
from functools import cache, partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.corpora.mixture import BLOCK, Mixture
from data.corpora.sampler import STRETCH, grouped

MIXED = Mixture(("a", "b", "c"), (100, 3000, 7), (1.0, 2.5, 0.1))


def order(mixture: Mixture, count: int, *, seed: int = 0, size: int = 8) -> np.ndarray:
    return np.concatenate([mixture.sample_ids(n, seed=seed, global_size=size) for n in range(-(-count // size))])[
        :count
    ]


def test_the_order_does_not_depend_on_the_batch_size() -> None:
    whole = order(MIXED, 3 * BLOCK, size=64)
    for size in (8, 48, 2 * BLOCK):
        assert np.array_equal(order(MIXED, 3 * BLOCK, size=size), whole)
    assert not np.array_equal(order(MIXED, 3 * BLOCK, seed=1), whole)


def test_shares_are_exact_and_every_sample_comes_once_an_epoch() -> None:
    ids = order(MIXED, 20 * BLOCK, size=BLOCK)
    counts = Counter(MIXED.source_of(ids).tolist())
    for source, share in enumerate(MIXED.shares()):
        assert counts[source] == pytest.approx(20 * BLOCK * share, abs=3)
    first = 0
    for source, size in enumerate(MIXED.samples):
        own = ids[MIXED.source_of(ids) == source] - first
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))
        if len(own) >= 2 * size:
            assert own[:size].tolist() != own[size : 2 * size].tolist()
        first += size


@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.floats(1e-2, 1e2)), min_size=1, max_size=4),
    st.integers(1, 512),
    st.integers(0, 1000),
)
def test_grouping_by_length_keeps_the_passes_and_shares_of_sources(
    sources: list[tuple[int, float]], size: int, seed: int
) -> None:
    samples, weights = zip(*sources, strict=True)
    mixture = Mixture(tuple(map(str, range(len(sources)))), samples, weights)
    lengths, about = np.random.default_rng(seed).integers(1, 100, sum(samples)), STRETCH * size
    span = max(about // BLOCK, 1) * BLOCK
    count = -(-2 * span // size)
    drawn = cache(lambda position: mixture.sample_ids(position, seed=seed, global_size=size))
    bounds = partial(mixture.bounds, seed=seed, about=about)
    ids = np.concatenate([grouped(at, lengths, drawn, bounds, seed=seed, global_size=size) for at in range(count)])
    plain, first = np.concatenate([drawn(at) for at in range(count)]), 0
    for window in (span, 2 * span):
        assert np.array_equal(np.sort(ids[:window]), np.sort(plain[:window])), "each source has had its share"
    for source, own_size in enumerate(samples):
        own = ids[mixture.source_of(ids) == source] - first
        for start in range(0, len(own) - own_size + 1, own_size):
            assert np.array_equal(np.sort(own[start : start + own_size]), np.arange(own_size))
        assert len(np.unique(own[len(own) // own_size * own_size :])) == len(own) % own_size
        first += own_size


def test_a_block_is_shuffled() -> None:
    sources = MIXED.source_of(order(MIXED, BLOCK))
    runs = int((np.diff(sources) != 0).sum())
    assert runs > BLOCK / 4
