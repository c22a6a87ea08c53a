"""The sampler and mixtures: every sample once an epoch, exact shares, one global batch whatever the number of ranks."""

from collections import Counter
from functools import cache, partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.corpora.mixture import BLOCK, Mixture
from data.corpora.sampler import STRETCH, grouped, permute, sample_ids, split_for_rank


def epoch_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    return permute(np.arange(samples), samples=samples, seed=seed, epoch=np.full(samples, epoch))


@settings(deadline=None)
@given(samples=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_an_epoch_is_a_bijection(samples: int, seed: int, epoch: int) -> None:
    order = epoch_order(samples, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(samples))


@settings(deadline=None)
@given(samples=st.integers(1, 10_000), size=st.integers(1, 512), seed=st.integers(0, 1000), epochs=st.integers(1, 3))
def test_batches_in_a_row_hold_every_sample_once_an_epoch(samples: int, size: int, seed: int, epochs: int) -> None:
    samples = min(samples, 100 * size)
    needed = -(-samples * epochs // size)
    stream = np.concatenate([sample_ids(p, samples=samples, seed=seed, global_size=size) for p in range(needed)])
    for epoch in range(epochs):
        one = stream[epoch * samples : (epoch + 1) * samples]
        assert np.array_equal(np.sort(one), np.arange(samples))


@settings(deadline=None)
@given(
    world_sizes=st.tuples(st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 3, 4, 6, 12])),
    micro_sizes=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    position=st.integers(0, 10**9),
    samples=st.integers(1, 10**12),
    seed=st.integers(0, 2**32),
)
def test_the_global_batch_is_the_same_at_every_world_size(world_sizes, micro_sizes, position, samples, seed):
    whole = sample_ids(position, samples=samples, seed=seed, global_size=48)
    for world_size, micro_size in zip(world_sizes, micro_sizes, strict=True):
        sizes = {"micro_size": micro_size, "world_size": world_size}
        parts = [split_for_rank(whole, rank=rank, **sizes) for rank in range(world_size)]
        assert {part.shape for part in parts} == {(48 // (micro_size * world_size), micro_size)}
        # (accumulation, world, micro) laid out flat is the global batch in its own order.
        assert np.array_equal(np.stack(parts, axis=1).reshape(-1), whole)


def test_epochs_and_seeds_differ() -> None:
    orders = {(seed, epoch): epoch_order(1000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)}
    keys = list(orders)
    for i, first in enumerate(keys):
        for second in keys[i + 1 :]:
            # Two random orders agree in about one place of a thousand.
            assert (orders[first] == orders[second]).sum() < 20


def test_where_a_sample_comes_is_uniform() -> None:
    samples, epochs = 97, 4000
    firsts = permute(np.zeros(epochs, dtype=np.int64), samples=samples, seed=3, epoch=np.arange(epochs))
    counts = np.bincount(firsts, minlength=samples)
    expected = epochs / samples
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 96 degrees of freedom: mean 96, standard deviation 13.9. Fixed seed, so this does not flicker.
    assert chi_square < 96 + 4 * 13.9


def test_neighbours_are_spread() -> None:
    order = epoch_order(100_000, 0, 0).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.02


def test_a_far_position_of_a_huge_corpus_is_reached_at_once() -> None:
    ids = sample_ids(10**9, samples=3 * 10**11, seed=1, global_size=1024)
    assert ids.dtype == np.int64
    assert len(set(ids.tolist())) == 1024
    assert ids.min() >= 0
    assert ids.max() < 3 * 10**11


def test_the_order_is_part_of_the_contract() -> None:
    """A checkpoint holds only a position: another order under the same seed would replay and skip data on resume."""
    assert sample_ids(0, samples=10, seed=0, global_size=10).tolist() == [7, 5, 8, 2, 4, 9, 6, 1, 3, 0]


def ordered(samples: int, lengths: np.ndarray, count: int, *, size: int, seed: int) -> list[np.ndarray]:
    """The first batches of padded rows of one source."""
    drawn = cache(lambda position: sample_ids(position, samples=samples, seed=seed, global_size=size))

    def epoch_of(place: int) -> tuple[int, int]:
        return place // samples * samples, (place // samples + 1) * samples

    given = {"seed": seed, "global_size": size}
    return [grouped(at, lengths.__getitem__, drawn, epoch_of, **given) for at in range(count)]


def padding(batches: list[np.ndarray], lengths: np.ndarray) -> int:
    return sum(int((lengths[ids].max() - lengths[ids]).sum()) for ids in batches)


@settings(deadline=None, max_examples=50)
@given(samples=st.integers(1, 10_000), size=st.integers(1, 512), seed=st.integers(0, 1000), epochs=st.integers(1, 3))
@example(samples=112, size=16, seed=0, epochs=3)
@example(samples=300, size=32, seed=0, epochs=3)
@example(samples=1, size=512, seed=0, epochs=3)
def test_grouping_by_length_leaves_every_sample_once_an_epoch(samples: int, size: int, seed: int, epochs: int) -> None:
    samples = min(samples, 100 * size)  # more batches show no more
    lengths = np.random.default_rng(seed).integers(1, 100, samples)
    batches = ordered(samples, lengths, -(-samples * epochs // size), size=size, seed=seed)
    assert {len(ids) for ids in batches} == {size}
    stream = np.concatenate(batches)
    for epoch in range(epochs):
        assert np.array_equal(np.sort(stream[epoch * samples : (epoch + 1) * samples]), np.arange(samples))
    for position, ids in enumerate(batches):
        within_an_epoch = position * size // samples == ((position + 1) * size - 1) // samples
        assert not within_an_epoch or len(np.unique(ids)) == size


@pytest.mark.parametrize("samples", [500, 512])
def test_batches_of_similar_length_have_less_padding_and_come_in_any_order(samples: int) -> None:
    lengths, count = np.random.default_rng(0).integers(1, 100, samples), 4 * STRETCH
    drawn = [sample_ids(position, samples=samples, seed=4, global_size=8) for position in range(count)]
    found = ordered(samples, lengths, count, size=8, seed=4)
    longest = [lengths[ids].max() for ids in found[:STRETCH]]
    assert longest != sorted(longest), "their order is shuffled"
    assert padding(found, lengths) < padding(drawn, lengths) / 5
    others = ordered(samples, lengths, count, size=8, seed=5)
    assert any(not np.array_equal(mine, other) for mine, other in zip(found, others, strict=True)), "it is the seed's"


@pytest.mark.parametrize(("position", "samples"), [(0, 0), (-1, 5)])
def test_no_batch_of_nothing(position: int, samples: int) -> None:
    with pytest.raises(ValueError, match="no batch"):
        sample_ids(position, samples=samples, seed=0, global_size=2)


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
def test_grouping_by_length_keeps_the_passes_and_shares_of_sources(sources, size, seed) -> None:
    samples, weights = zip(*sources, strict=True)
    mixture = Mixture(tuple(map(str, range(len(sources)))), samples, weights)
    lengths, about = np.random.default_rng(seed).integers(1, 100, sum(samples)), STRETCH * size
    span = max(about // BLOCK, 1) * BLOCK
    count = -(-2 * span // size)
    drawn = cache(lambda position: mixture.sample_ids(position, seed=seed, global_size=size))
    bounds = partial(mixture.bounds, seed=seed, about=about)
    of, given = lengths.__getitem__, {"seed": seed, "global_size": size}
    ids = np.concatenate([grouped(at, of, drawn, bounds, **given) for at in range(count)])
    plain, first = np.concatenate([drawn(at) for at in range(count)]), 0
    for window in (span, 2 * span):
        assert np.array_equal(np.sort(ids[:window]), np.sort(plain[:window])), "each source has had its share"
    for source, own_size in enumerate(samples):
        own = ids[mixture.source_of(ids) == source] - first
        for start in range(0, len(own) - own_size + 1, own_size):
            assert np.array_equal(np.sort(own[start : start + own_size]), np.arange(own_size))
        assert len(np.unique(own[len(own) // own_size * own_size :])) == len(own) % own_size
        first += own_size


@pytest.mark.parametrize("sources", [32, 33, 39])
def test_many_sources_have_their_shares(sources: int) -> None:
    mixture = Mixture(tuple(map(str, range(sources))), (1000,) * sources, (1.0,) * sources)
    for block in range(2 * sources):
        counts = np.bincount(mixture.source_of(mixture.block(block, seed=0)), minlength=sources)
        assert np.abs(counts[1:] - mixture.block_size / sources).max() < 1


def test_a_block_is_shuffled() -> None:
    sources = MIXED.source_of(order(MIXED, BLOCK))
    runs = int((np.diff(sources) != 0).sum())
    assert runs > BLOCK / 4
