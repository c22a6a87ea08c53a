"""Batches: the right windows, slices and masks on the right rank, exact restore, errors that surface, padding."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from config.batch import WHOLE_POSITIONS
from config.errors import UserError
from data.batches.loader import (
    IGNORED_LABEL,
    NO_SAMPLE,
    Batch,
    Batches,
    next_tokens,
    sample_ids_sha256,
    validation_batches,
)
from data.batches.masking import Masking
from data.batches.sequence_slices import slice_of, sliced
from data.corpora.documents import Documents, document_positions
from data.corpora.shards import TokenShards, open_shard, write_shard
from tests.support.rows import labelled
from tests.support.rows.chats import byte_level
from tools.analyze.survey import first_sequences

LENGTH = 8
SIZES: dict[str, Any] = {"sequence_length": LENGTH, "seed": 5, "global_size": 12, "micro_size": 2}


def make(folder: Path, tokens: int | np.ndarray) -> TokenShards:
    """One shard of these tokens, or of so many that are their own positions."""
    path = folder / "train-00000.safetensors"
    array = np.arange(tokens, dtype=np.uint16) if isinstance(tokens, int) else tokens
    return TokenShards([open_shard(path, write_shard(path, array, {"split": "train"}), verify=True)])


def first_steps(shards: TokenShards, count: int, **options: Any) -> list[Batch]:
    batches = Batches(shards, **{**SIZES, **options})
    steps = [batches.next_step() for _ in range(count)]
    batches.close()
    return steps


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    return make(tmp_path, 40 * LENGTH + 1)


def same(first: Batch, second: Batch) -> bool:
    return (
        first.position == second.position
        and torch.equal(first.input_ids, second.input_ids)
        and torch.equal(first.labels, second.labels)
        and np.array_equal(first.sample_ids, second.sample_ids)
    )


def test_labels_are_the_next_tokens_and_rows_are_the_samples(shards: TokenShards) -> None:
    batches = Batches(shards, **SIZES, rank=1, world_size=2)
    for position in range(5):
        batch = batches.next_step()
        assert batch.position == position
        assert batch.input_ids.shape == batch.labels.shape == (3, 2, LENGTH)
        assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
        assert torch.equal(batch.labels, batch.input_ids + 1)
        assert batch.label_tokens == 6 * LENGTH
        mine = batch.sample_ids.reshape(3, 2, 2)[:, 1]
        assert torch.equal(batch.input_ids[..., 0], torch.from_numpy(mine) * LENGTH)
    assert batches.position == 5
    batches.close()


@pytest.mark.parametrize(("micro_size", "world_size"), [(12, 1), (1, 1), (3, 2), (2, 3), (1, 12)])
def test_the_ranks_together_see_the_same_windows(shards: TokenShards, micro_size: int, world_size: int) -> None:
    seen: list[list[int]] = []
    for rank in range(world_size):
        steps = first_steps(shards, 4, micro_size=micro_size, rank=rank, world_size=world_size)
        seen.append([int(row[0]) // LENGTH for step in steps for row in step.input_ids.reshape(-1, LENGTH)])
    for position in range(4):
        share = 12 // world_size
        rows = [row for part in seen for row in part[position * share : (position + 1) * share]]
        assert sorted(rows) == sorted(steps[position].sample_ids.tolist())


def test_restore_gives_what_an_unbroken_run_gives(shards: TokenShards) -> None:
    expected = first_steps(shards, 12, rank=0, world_size=2)
    resumed = Batches(shards, **SIZES, rank=0, world_size=2)
    resumed.next_step()
    for position in (7, 0, 3, 3):
        resumed.restore(position)
        assert resumed.position == position
        for wanted in expected[position : position + 4]:
            assert same(resumed.next_step(), wanted)
    resumed.close()


def test_what_the_background_thread_raises_surfaces_and_restore_recovers(shards: TokenShards) -> None:
    class Broken(TokenShards):
        broken = False

        def read(self, ids: np.ndarray, sequence_length: int) -> np.ndarray:
            if self.broken:
                raise OSError("disk gone")
            return super().read(ids, sequence_length)

    broken = Broken(shards.shards)
    batches = Batches(broken, **SIZES, rank=0, world_size=1)
    first = batches.next_step()
    batches._ahead.result()
    broken.broken = True
    batches.next_step()
    with pytest.raises(OSError, match="disk gone"):
        batches.next_step()
    assert batches.position == 2
    broken.broken = False
    batches.restore(0)
    assert same(batches.next_step(), first)
    batches.close()


def test_too_little_text_and_sizes_that_do_not_divide_are_told_before_the_first_step(tmp_path: Path) -> None:
    little = make(tmp_path, LENGTH)
    with pytest.raises(UserError, match=rf"data.sequence_length={LENGTH}: the training data has {LENGTH} tokens"):
        Batches(little, **SIZES, rank=0, world_size=1)
    with pytest.raises(UserError, match="batch.global_size=12"):
        Batches(make(tmp_path, LENGTH + 1), **{**SIZES, "micro_size": 5}, rank=0, world_size=1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("sequences", "batches"), [(40, 2), (40, 9), (5, 1), (12, 1), (25, 3), (40, None)])
def test_validation_is_spread_over_the_set_sees_nothing_twice_and_pads_the_last_batch(
    tmp_path: Path, sequences: int, batches: int | None, world_size: int
) -> None:
    shards = make(tmp_path, sequences * LENGTH + 1)
    options = {"sequence_length": LENGTH, "global_size": 12, "micro_size": 2, "batches": batches}
    places = [{"rank": rank, "world_size": world_size} for rank in range(world_size)]
    ranks = [list(validation_batches(shards, **options, **place)) for place in places]
    wanted = sequences if batches is None else min(sequences, batches * 12)
    assert {len(part) for part in ranks} == {-(-wanted // 12)}
    labels = torch.cat([batch.labels.reshape(-1) for part in ranks for batch in part])
    counted = labels[labels != IGNORED_LABEL]
    spread = [index * sequences // wanted for index in range(wanted)]
    expected = [token for sequence in spread for token in range(sequence * LENGTH + 1, (sequence + 1) * LENGTH + 1)]
    assert sorted(counted.tolist()) == expected
    for step in zip(*ranks, strict=True):
        assert len({batch.input_ids.shape for batch in step}) == 1
        assert sum(batch.label_tokens for batch in step) == LENGTH * int((step[0].sample_ids != NO_SAMPLE).sum())
        for batch in step:
            assert batch.label_tokens == int((batch.labels != IGNORED_LABEL).sum())
            assert int(batch.input_ids.min()) >= 0


def test_validation_of_nothing_is_no_batch() -> None:
    options = {"sequence_length": LENGTH, "global_size": 4, "micro_size": 2, "batches": 3}
    assert list(validation_batches(TokenShards([]), **options, rank=0, world_size=1)) == []


def test_the_hash_of_sample_ids_depends_on_order_and_values_only() -> None:
    ids = np.array([3, 1, 2])
    assert sample_ids_sha256(ids) == sample_ids_sha256(np.array([9, 3, 1, 2, 9])[1:4].astype(np.int32))
    assert sample_ids_sha256(ids) != sample_ids_sha256(ids[::-1])


@pytest.mark.parametrize("one_row", [False, True])
def test_documents_are_marked_and_their_first_tokens_are_not_predicted(tmp_path: Path, one_row: bool) -> None:
    end, rows = 2, 2
    tokens = np.random.default_rng(3).integers(0, 6, size=20 * LENGTH + 1).astype(np.uint16)
    shards = make(tmp_path, tokens)
    (expected,) = first_steps(shards, 1, rank=0, world_size=1)
    (batch,) = first_steps(shards, 1, rank=0, world_size=1, documents=Documents(end, one_row=one_row))
    assert expected.position_ids is None
    assert torch.equal(batch.input_ids, expected.input_ids)
    ends = batch.input_ids == end
    assert ends.any()
    assert not ends.all()
    assert (batch.labels[ends] == IGNORED_LABEL).all()
    assert torch.equal(batch.labels[~ends], expected.labels[~ends])
    assert batch.label_tokens == int((~ends).sum())
    assert batch.position_ids is not None
    flat = batch.input_ids.reshape(-1, LENGTH).numpy()
    assert np.array_equal(batch.position_ids.reshape(-1, LENGTH).numpy(), document_positions(flat, end))
    seen = list(batch.micro_batches(torch.device("cpu")))
    assert len(seen) == len(batch.input_ids)
    for index, (inputs, labels) in enumerate(seen):
        shape = (1, rows * LENGTH) if one_row else (rows, LENGTH)
        assert inputs["input_ids"].shape == inputs["position_ids"].shape == labels.shape == shape
        assert torch.equal(inputs["input_ids"].reshape(-1), batch.input_ids[index].reshape(-1))
        assert torch.equal(labels.reshape(-1), batch.labels[index].reshape(-1))
    one = first_sequences(batch, 1)
    assert one.position_ids is not None
    assert one.position_ids.shape == one.input_ids.shape == (1, 1, LENGTH)
    assert one.label_tokens == int((one.labels != IGNORED_LABEL).sum())


def test_validation_batches_mark_documents_and_filled_up_rows_stay_masked(shards: TokenShards) -> None:
    options: dict[str, Any] = {"sequence_length": LENGTH, "global_size": 12, "micro_size": 2, "batches": 9}
    for batch in validation_batches(shards, **options, rank=0, world_size=1, documents=Documents(5)):
        assert batch.position_ids is not None
        assert batch.position_ids.shape == batch.input_ids.shape
        assert batch.label_tokens == int((batch.labels != IGNORED_LABEL).sum())


@pytest.mark.parametrize("micro_size", [1, 3])
def test_every_rank_knows_the_labels_of_all_unless_documents_mask_some(shards: TokenShards, micro_size: int) -> None:
    for documents in (None, Documents(3, one_row=False)):
        each_rank = []
        for rank in (0, 1):
            options = {"micro_size": micro_size, "rank": rank, "world_size": 2, "documents": documents}
            validation = validation_batches(shards, sequence_length=LENGTH, global_size=12, batches=4, **options)
            each_rank.append([*first_steps(shards, 3, **options), *validation])
        for mine, other in zip(*each_rank, strict=True):
            counted = mine.label_tokens + other.label_tokens
            assert mine.label_tokens_of_all == other.label_tokens_of_all == (counted if documents is None else None)
            assert first_sequences(mine, 1).label_tokens_of_all is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_batches_are_where_a_device_can_fetch_them_by_itself(shards: TokenShards) -> None:
    (batch,) = first_steps(shards, 1, rank=0, world_size=2, documents=Documents(3, one_row=False))
    assert batch.position_ids is not None
    assert batch.input_ids.is_pinned() and batch.labels.is_pinned() and batch.position_ids.is_pinned()


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


TEXT = "def add(first_one, second): return first_one + second2  # naïve, 日本 text\n"


def pieces() -> tuple[PreTrainedTokenizerFast, np.ndarray]:
    """WordPiece and 40,000 tokens of its words, with [SEP] among them."""
    made, draw = labelled.tokenizer(), random.Random(0)
    text = " [SEP] ".join(" ".join(labelled.words(draw, 30)) for _ in range(1500))
    return made, np.array(made(text, add_special_tokens=False).input_ids[:40_000])


@pytest.mark.parametrize("whole_word", [False, True])
def test_shares_are_those_of_bert(whole_word: bool) -> None:
    tokenizer, ids = pieces()
    masking = Masking.of(tokenizer, probability=0.15, whole_word=whole_word)
    seen, labels = masking(ids, "0/1/2")
    special = np.isin(ids, tokenizer.all_special_ids)
    chosen = labels != IGNORED_LABEL
    assert not (chosen & special).any()
    assert (labels[chosen] == ids[chosen]).all()
    assert (seen[~chosen] == ids[~chosen]).all()
    # four standard deviations; words of three tokens and more make the share of tokens vary more
    assert chosen.sum() / (~special).sum() == pytest.approx(0.15, abs=0.016 if whole_word else 0.008)
    masked, kept = seen[chosen] == tokenizer.mask_token_id, seen[chosen] == ids[chosen]
    assert masked.mean() == pytest.approx(0.8, abs=0.022)
    assert kept.mean() == pytest.approx(0.1, abs=0.018)  # and one in a vocabulary that is replaced by itself
    others = seen[chosen][~masked & ~kept]
    assert not np.isin(others, tokenizer.all_special_ids).any()
    assert len(set(others.tolist())) > 0.9 * (len(tokenizer) - 5)


def test_a_mask_is_a_function_of_its_key_and_the_tokens() -> None:
    tokenizer, ids = pieces()
    masking = Masking.of(tokenizer, probability=0.15, whole_word=True)
    again = Masking.of(labelled.tokenizer(), probability=0.15, whole_word=True)
    np.random.seed(1)
    for mine, theirs in zip(masking(ids, "0/1/2"), again(ids, "0/1/2"), strict=True):
        assert (mine == theirs).all()
    for key in ("1/1/2", "0/2/2", "0/1/3"):
        assert (masking(ids, key)[1] != masking(ids, "0/1/2")[1]).any()
    # written down: another version of a library must not hide other tokens of a run that is resumed
    assert np.flatnonzero(masking(ids[:40], "0/1/2")[1] != IGNORED_LABEL).tolist() == FIRST


FIRST = [16, 17, 22, 23, 34]


def test_whole_words_of_wordpiece() -> None:
    tokenizer, ids = pieces()
    masking = Masking.of(tokenizer, probability=0.3, whole_word=True)
    tokens, words = tokenizer.convert_ids_to_tokens(ids), masking.words(ids)
    expected, word = [], -1
    for token in tokens:
        word += not token.startswith("##")
        expected.append(word)
    assert words.tolist() == expected
    chosen = masking(ids, "a")[1] != IGNORED_LABEL
    together = [len(set(chosen[words == word].tolist())) == 1 for word in range(200)]
    assert all(together)
    lengths = np.bincount(words)
    assert (lengths > 1).sum() > 100  # else it would show nothing


def test_whole_words_of_a_byte_level_tokenizer() -> None:
    """It has so few merges that words are in pieces."""
    settings = {"eos_token": "</s>", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(290, (), TEXT), **settings)
    ids = np.array(tokenizer(TEXT).input_ids)
    masking = Masking.of(tokenizer, probability=0.15, whole_word=True)
    found = masking.words(ids)
    texts: dict[int, list[int]] = {}
    for token, word in zip(ids.tolist(), found.tolist(), strict=True):
        texts.setdefault(word, []).append(token)
    whole = [tokenizer.decode(tokens).strip() for tokens in texts.values()]
    for word in ("def", "add", "first_one", "second", "return", "second2", "naïve", "日本", "text"):
        assert word in whole, whole
    assert whole.count("first_one") == 2
    assert max(len(tokens) for tokens in texts.values()) > 3
    *long, last = np.bincount(masking.words(np.array(tokenizer("日本" * 9 + " 日本").input_ids)))
    assert max(long) == 1 < last, "text without spaces is no word"
