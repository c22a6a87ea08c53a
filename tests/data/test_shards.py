"""Shards: exact round trips, windows in which every token is a label once, and damage that is always noticed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from config.errors import UserError
from data.corpora.shards import TokenShards, open_shard, token_dtype, write_shard


def make(folder: Path, *lengths: int, dtype: str = "uint16") -> TokenShards:
    """Shards of the given lengths whose tokens count up through all of them."""
    shards, start = [], 0
    for number, length in enumerate(lengths):
        path = folder / f"train-{number:05d}.safetensors"
        tokens = np.arange(start, start + length).astype(dtype)
        shards.append(open_shard(path, write_shard(path, tokens, {"split": "train"}), verify=True))
        start += length
    return TokenShards(shards)


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """The file of a shard and its entry for the index."""
    path = tmp_path / "train-00000.safetensors"
    return path, write_shard(path, np.arange(40, dtype=np.uint16), {"split": "train", "documents": "3"})


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_the_smallest_dtype_that_holds_the_vocabulary(vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size) == dtype
    assert np.iinfo(dtype).max >= vocab_size - 1


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_come_back_and_any_safetensors_reader_sees_them(tmp_path: Path, dtype: str) -> None:
    tokens = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, 1000, endpoint=True).astype(dtype)
    path = tmp_path / "a.safetensors"
    shard = open_shard(path, write_shard(path, tokens, {"split": "train"}), verify=True)
    assert isinstance(shard.array, np.memmap)
    assert np.array_equal(shard.array, tokens)
    assert np.array_equal(load_file(path)["tokens"], tokens)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4), sequence_length=st.integers(1, 25))
def test_every_token_is_a_label_at_most_once_and_only_tails_are_left_out(tmp_path_factory, lengths, sequence_length):
    shards = make(tmp_path_factory.mktemp("shards"), *lengths)
    windows = shards.read(np.arange(shards.sequences(sequence_length)), sequence_length)
    labels = windows[:, 1:].reshape(-1)
    assert len(set(labels.tolist())) == len(labels)
    # The tokens count up, so a window that crossed into another shard or started elsewhere would show here.
    assert (np.diff(windows, axis=1) == 1).all()
    used = set(windows.reshape(-1).tolist())
    tails = [n - (windows * sequence_length + 1 if (windows := (n - 1) // sequence_length) else 0) for n in lengths]
    assert shards.tokens - len(used) == sum(tails)
    assert shards.sequences(sequence_length) == sum(max(0, (n - 1) // sequence_length) for n in lengths)


def test_windows_stop_at_the_shard_and_step_by_the_length(tmp_path: Path) -> None:
    shards = make(tmp_path, 10, 3, 9)
    starts = (13, 0, 4, 17)
    assert shards.read(np.array([2, 0, 1, 3]), 4).tolist() == [list(range(start, start + 5)) for start in starts]
    assert shards.sequences(4) == 4


@pytest.mark.parametrize("ids", [[-1], [4], [0, 99]])
def test_windows_that_do_not_exist(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(IndexError, match="of 4"):
        make(tmp_path, 10, 3, 9).read(np.array(ids), 4)


def test_no_shards_is_no_sequence() -> None:
    nothing = TokenShards([])
    assert (nothing.tokens, nothing.sequences(8)) == (0, 0)
    assert nothing.read(np.empty(0, dtype=np.int64), 8).shape == (0, 9)


def test_every_flipped_bit_is_noticed(written: tuple[Path, dict[str, Any]]) -> None:
    path, entry = written
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(UserError, match=r"train-00000.safetensors: damaged.*Delete the folder"):
            open_shard(path, entry, verify=True)
    path.write_bytes(whole)
    open_shard(path, entry, verify=True)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("change", [-1, 1, -(10**6)])
def test_another_size_is_noticed_even_unverified(written: Any, verify: bool, change: int) -> None:
    path, entry = written
    whole = path.read_bytes()
    path.write_bytes((whole + b"x")[: max(0, len(whole) + change)])
    with pytest.raises(UserError, match=r"bytes instead of"):
        open_shard(path, entry, verify=verify)
