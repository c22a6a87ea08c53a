"""Shards and Megatron-LM's indexed datasets: exact round trips, and damage that is always noticed."""

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import data.sources.megatron
from config.errors import UserError
from config.schema import DataSection
from data.corpora.shards import TokenShards, open_shard, token_dtype, write_shard
from data.sources.megatron import documents
from data.sources.sources import open_source
from tests.support.refusals import refused
from tests.support.rows import indexed_dataset


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


@pytest.mark.parametrize("code", indexed_dataset.FORMATS)
def test_documents_are_those_that_were_written(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.sources.megatron, "_CHECKED_AT_ONCE", 7)
    draw, largest = random.Random(code), min(2 ** (8 * struct.calcsize(f"<{indexed_dataset.FORMATS[code]}") - 1), 2**40)
    written = [
        [[draw.randrange(largest) for _ in range(draw.randrange(5))] for _ in range(draw.choice((0, 1, 1, 1, 3)))]
        for _ in range(40)
    ]
    indexed_dataset.write(tmp_path / "a.v1", written, code)
    found = [document.tolist() for document in documents(tmp_path / "a.v1.idx")]
    assert found == [[token for sequence in document for token in sequence] for document in written]


def test_nothing_written_is_nothing_read(tmp_path: Path) -> None:
    indexed_dataset.write(tmp_path / "a", [])
    assert list(documents(tmp_path / "a.idx")) == []


def test_every_way_to_name_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        indexed_dataset.write(tmp_path / name, [[[1, 2]]])

    def files(path: str) -> list[str]:
        source = open_source(DataSection(source="megatron", path=str(tmp_path / path)))
        return [Path(file).name for file in source.files]

    for path in ("a", "a.idx", "a.bin"):
        assert files(path) == ["a.idx"]
    for path in ("", "*", "*.idx", "[ab]*"):
        assert files(path) == ["a.idx", "b.idx"]
    (tmp_path / "d.bin").write_bytes(b"ab")
    assert "d.idx is missing, which says where the documents of a .bin begin" in refused(files, "d.bin")
    assert "c: no file there" in refused(files, "c")
    before = open_source(DataSection(source="megatron", path=str(tmp_path))).identity
    indexed_dataset.write(tmp_path / "b", [[[1, 3]]])  # the same index
    assert open_source(DataSection(source="megatron", path=str(tmp_path))).identity != before


DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]]]
HEADER, LENGTHS, POINTERS, BORDERS = 34, 34, 34 + 3 * 4, 34 + 3 * 12


@pytest.mark.parametrize(
    ("place", "content", "problem"),
    [
        (0, b"TNTIDX", "a.idx: .*does not begin with MMIDIDX"),
        (9, b"\x02", "a.idx: .*its version is 2, not 1"),
        (17, b"\x07", "a.idx: .*its dtype has the code 7"),
        (18, b"\x04", "a.idx: .*it has 94 bytes instead of 106"),
        (LENGTHS, b"\xff\xff\xff\xff", "a.idx: .*has an impossible length or position"),
        (LENGTHS + 8, b"\x03", r"a.bin: .*it has 12 bytes, and a.idx ends at 14"),
        (POINTERS, b"\x01", "a.idx: .*has an impossible length or position"),
        (POINTERS + 8, struct.pack("<q", -2), "a.idx: .*has an impossible length or position"),
        (POINTERS + 16, b"\x0a", "a.bin: .*it has 12 bytes, and a.idx ends at 14"),
        (BORDERS, b"\x01", "a.idx: .*its documents do not cover all its 3 sequences"),
        (BORDERS + 16, b"\x02", "a.idx: .*its documents do not cover all its 3 sequences"),
        (BORDERS + 8, b"\x04", "a.idx: .*its documents are not in order"),
    ],
)
def test_a_damaged_index_is_refused_in_one_line(tmp_path: Path, place: int, content: bytes, problem: str) -> None:
    indexed_dataset.write(tmp_path / "a", DOCUMENTS)
    whole = (tmp_path / "a.idx").read_bytes()
    (tmp_path / "a.idx").write_bytes(whole[:place] + content + whole[place + len(content) :])
    with pytest.raises(UserError, match=problem) as caught:
        list(documents(tmp_path / "a.idx"))
    assert "\n" not in str(caught.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    for name in ("a.idx", "a.bin"):
        indexed_dataset.write(tmp_path / "a", DOCUMENTS)
        whole = (tmp_path / name).read_bytes()
        for size in [*range(len(whole)), len(whole) + 2]:
            (tmp_path / name).write_bytes((whole + b"\0\0")[:size])
            with pytest.raises(UserError, match=rf"^{tmp_path}/{name}: is damaged or not in"):
                list(documents(tmp_path / "a.idx"))
    (tmp_path / "a.bin").unlink()
    with pytest.raises(UserError, match=r"a.bin: cannot be read .*needs a .bin beside each .idx"):
        list(documents(tmp_path / "a.idx"))


def test_a_multimodal_set_is_named(tmp_path: Path) -> None:
    indexed_dataset.write(tmp_path / "a", DOCUMENTS)
    with (tmp_path / "a.idx").open("ab") as file:
        file.write(b"\0\0\0")
    assert "97 bytes instead of 94 and is multimodal" in refused(list, documents(tmp_path / "a.idx"))
