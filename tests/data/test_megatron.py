"""Megatron-LM's indexed datasets: read as they were written, and refused where they are damaged."""

import random
import struct
from pathlib import Path

import pytest

import data.sources.megatron
from config.errors import UserError
from config.schema import DataSection
from data.sources.megatron import documents
from data.sources.sources import open_source
from tests.support.refusals import refused
from tests.support.rows import indexed_dataset


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
