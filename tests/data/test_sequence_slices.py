"""Slices of sequences: laid end to end they are the whole batch, and padding counts for nothing."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from config.batch import WHOLE_POSITIONS
from data.batches.loader import IGNORED_LABEL, NO_SAMPLE, Batch, next_tokens
from data.batches.sequence_slices import slice_of, sliced
from data.corpora.documents import document_positions
from tests.data.test_loader import make
from tools.analyze.survey import first_sequences

END = 1


def a_batch(length: int, seed: int, *, apart: bool) -> Batch:
    """Two micro-batches of three sequences; some labels are masked."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, 5, size=(6, length + 1))
    ids, labels = tokens[:, :-1].copy(), np.where(generator.random((6, length)) < 0.3, IGNORED_LABEL, tokens[:, 1:])
    positions = torch.from_numpy(document_positions(ids, END)).reshape(2, 3, length) if apart else None
    inputs, targets = (torch.from_numpy(values).reshape(2, 3, length) for values in (ids, labels))
    counted = int((labels != IGNORED_LABEL).sum())
    return Batch(7, inputs, targets, np.arange(6), counted, label_tokens_of_all=counted, position_ids=positions)


@given(st.integers(2, 20), st.integers(1, 5), st.integers(0, 99), st.booleans())
def test_slices_end_to_end_are_the_batch(length: int, ranks: int, seed: int, apart: bool) -> None:
    whole = a_batch(length, seed, apart=apart)
    parts = [slice_of(whole, rank=rank, ranks=ranks) for rank in range(ranks)]
    each = -(-length // ranks)
    assert {part.input_ids.shape for part in parts} == {(2, 3, each)}
    ids, labels = (torch.cat([getattr(part, name) for part in parts], -1) for name in ("input_ids", "labels"))
    positions = torch.cat([part.position_ids for part in parts], -1)
    assert torch.equal(ids[..., :length], whole.input_ids)
    assert torch.equal(labels[..., :length], whole.labels)
    assert (labels[..., length:] == IGNORED_LABEL).all()
    expected = torch.arange(length).expand(2, 3, length) if whole.position_ids is None else whole.position_ids
    assert torch.equal(positions[..., :length], expected)
    assert torch.equal(positions[..., length:], torch.arange(each * ranks - length).expand(2, 3, -1))
    assert all(torch.equal(part.further[WHOLE_POSITIONS], positions) for part in parts)
    assert sum(part.label_tokens for part in parts) == whole.label_tokens
    assert sum(part.counted for part in parts).tolist() == whole.counted.tolist()
    assert {part.tokens for part in parts} == {whole.tokens}, "padding is not counted, nor is a slice a sequence"
    assert {part.label_tokens_of_all for part in parts} == {whole.label_tokens_of_all}


def test_the_last_label_of_a_slice_is_the_first_token_of_the_next(tmp_path) -> None:
    """Slices of real windows; a padding row has no label in any of them."""
    shards, ids = make(tmp_path, 41), np.array([2, NO_SAMPLE])
    first, second = (
        sliced(next_tokens(8, None), rank=rank, ranks=2)(shards, 0, ids, ids.reshape(1, 2)) for rank in (0, 1)
    )
    assert first.labels[0, 0].tolist() == [17, 18, 19, 20]
    assert second.input_ids[0, 0].tolist() == [20, 21, 22, 23]
    assert (first.labels[0, 1] == IGNORED_LABEL).all() and (second.labels[0, 1] == IGNORED_LABEL).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_micro_batch_brings_the_positions_of_the_whole(rank: int) -> None:
    part = slice_of(a_batch(9, 3, apart=True), rank=rank, ranks=2)
    for inputs, _ in part.micro_batches(torch.device("cpu")):
        assert inputs[WHOLE_POSITIONS].shape == (3, 10)
        assert torch.equal(inputs["position_ids"], inputs[WHOLE_POSITIONS][:, 5 * rank : 5 * rank + 5])
    few = first_sequences(dataclasses.replace(part), 2)
    assert few.further[WHOLE_POSITIONS].shape == (1, 2, 10)
