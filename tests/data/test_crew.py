"""Processes of several machines prepare one corpus together: its bytes are those of one process, whoever dies."""

import random
import re
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import data.prepare
from config.schema import DataSection
from data.crew import Pieces, Reader
from data.encode import Encoded, EncodedCodec
from data.pieces import piece_path, read_piece, write_piece
from data.prepare import prepare
from data.prepare_rows import EncodedRows, RowsCodec
from data.row_formats import BadRow
from tests.support.launches import finish, start

# A program: prepares with `section` as if on machine argv[1], and prints how many batches its workers and it as a
# helper computed. argv[2] says what happens: "meet": the reader goes on when somebody helps, and when each batch that
# it offers ("once": the first) is taken; "die reading": it is killed after six results; "die helping": it is killed
# with a batch taken.
PROGRAM = """
import os, signal, sys, time
import data.crew, data.prepare, data.prepare_rows
from config.schema import DataSection
if __name__ == "__main__":
    data.prepare.BATCH_CHARACTERS = 2000
    data.prepare_rows._BATCH_ROWS, data.prepare_rows._ROWS_HERE = 8, 16
    data.crew._LOOK_SECONDS = data.prepare._POLL_SECONDS_HELPING = 0.01
    data.crew.machine = lambda: sys.argv[1]
    here, met, helpers, acts = [], [], [], sys.argv[2].split(",")

    def until(condition):
        deadline = time.monotonic() + 100
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.005)

    class Reader(data.crew.Reader):
        def results(self, batches):
            if "meet" in acts:
                until(lambda: any(not path.suffix for path in self._pieces.helpers.iterdir()))
            for number, result in enumerate(super().results(batches)):
                if number == 6 and "die reading" in acts:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield result
        def _placed(self, number, batch, queue):
            placed = super()._placed(number, batch, queue)
            if "meet" in acts and placed.future is None and not ("once" in acts and met):
                met.append(number)
                until(lambda: not (self._pieces.open / f"{number:012d}").exists())
            return placed
        def _here(self, placed):
            here.append(placed.number)
            return super()._here(placed)

    class Helper(data.crew.Helper):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            helpers.append(self)
        def _take(self):
            super()._take()
            if self._running and "die helping" in acts:
                os.kill(os.getpid(), signal.SIGKILL)

    data.prepare.Reader = data.prepare_rows.Reader = Reader
    data.prepare.Helper = Helper
    section = DataSection(**SECTION)
    make = data.prepare.prepare if section.source == "text" else data.prepare_rows.prepare_rows
    corpus = make(section, progress=False)
    print(corpus.fingerprint, len(here), helpers[0].computed if helpers else 0)
"""


@pytest.fixture
def section(tmp_path: Path) -> DataSection:
    """Of a hundred documents, one of which is empty and one no text."""
    folder = tmp_path / "texts"
    folder.mkdir()
    generator = random.Random(0)
    for number in range(98):
        words = [generator.choice(["alpha", "beta", "γάμμα", "delta\n"]) for _ in range(generator.randint(1, 300))]
        (folder / f"{number:03d}.txt").write_bytes(" ".join(words).encode())
    (folder / "050b.txt").touch()
    (folder / "060b.txt").write_bytes(b"\xff")
    folders = {"path": str(folder), "cache_dir": str(tmp_path / "alone")}
    return DataSection(source="text", **folders, tokenizer="bpe:300", validation_fraction=0.2, workers=1)


def files(cache: str | Path, fingerprint: str) -> dict[str, bytes]:
    """Everything in the folder of a corpus."""
    folder = Path(cache) / fingerprint
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def program(section: DataSection, tmp_path: Path, machine: str, acts: str) -> list[str]:
    given = {key: getattr(section, key) for key in DataSection.__dataclass_fields__}
    name = f"{machine}-{acts.replace(' ', '-')}.py"
    (tmp_path / name).write_text(PROGRAM.replace("**SECTION", f"**{given!r}"), encoding="utf-8")
    return ["python", str(tmp_path / name), machine, acts]


def together(section: DataSection, tmp_path: Path, first: str, second: str) -> tuple[list[int | None], list[str]]:
    """Two processes at once, of which the first reads: their exit codes, and what they printed."""
    cache = Path(section.cache_dir)
    running = [start(program(section, tmp_path, "a", first))]
    while not list(cache.glob("*.partial-*")) and running[0].poll() is None:
        pass
    running.append(start(program(section, tmp_path, "b", second)))
    printed = [process.communicate(timeout=200)[0] for process in running]
    return [process.returncode for process in running], printed


def computed(printed: str) -> tuple[int, int]:
    """Batches that a process computed as the reader, and as a helper."""
    _, here, helped = printed.splitlines()[-1].split()
    return int(here), int(helped)


def batches(section: DataSection, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(data.prepare, "BATCH_CHARACTERS", 2000)
    return len(list(data.prepare._batches(data.prepare.open_source(section).documents(Counter()))))


def test_two_machines_write_the_bytes_of_one_process(section, tmp_path, monkeypatch) -> None:
    alone = prepare(section, progress=False)
    shared = replace(section, cache_dir=str(tmp_path / "shared"))
    codes, printed = together(shared, tmp_path, "meet", "")
    assert codes == [0, 0], printed
    (here, _), (nothing, helped) = map(computed, printed)
    assert helped >= 5 and here >= 5 and here + helped == batches(section, monkeypatch) and nothing == 0
    assert files(shared.cache_dir, alone.fingerprint) == files(section.cache_dir, alone.fingerprint)
    assert not list(Path(shared.cache_dir).glob("*.p*")), "neither partial folders nor pieces are left"


def test_a_helper_that_dies_is_named_and_its_part_is_made_up(section, tmp_path) -> None:
    alone = prepare(section, progress=False)
    shared = replace(section, cache_dir=str(tmp_path / "shared"))
    codes, printed = together(shared, tmp_path, "meet,once", "die helping")
    assert codes == [0, -9], printed
    assert re.search(
        r"^data: process \d+ on \S+, which tokenized a part, has ended; its part is done", printed[0], re.M
    )
    assert files(shared.cache_dir, alone.fingerprint) == files(section.cache_dir, alone.fingerprint)


def test_who_waits_goes_on_where_a_killed_reader_was(section, tmp_path, monkeypatch) -> None:
    alone = prepare(section, progress=False)
    shared = replace(section, cache_dir=str(tmp_path / "shared"))
    codes, printed = together(shared, tmp_path, "meet,die reading", "")
    assert codes == [-9, 0], printed
    here, helped = computed(printed[1])
    assert helped and here <= batches(section, monkeypatch) - 6, "what the killed one had is not computed again"
    assert files(shared.cache_dir, alone.fingerprint) == files(section.cache_dir, alone.fingerprint)
    assert not list(Path(shared.cache_dir).glob("*.p*"))


def test_a_killed_preparation_goes_on_and_damaged_pieces_are_computed_again(section, tmp_path, monkeypatch) -> None:
    alone = prepare(section, progress=False)
    killed = replace(section, cache_dir=str(tmp_path / "killed"))
    process = start(program(killed, tmp_path, "a", "die reading"))
    process.communicate()
    assert process.returncode == -9
    pieces = sorted((Path(killed.cache_dir) / f"{alone.fingerprint}.pieces" / "done").rglob("??/*"))
    assert len(pieces) >= 6
    for path, content in zip(
        pieces, (b"", pieces[1].read_bytes()[:-1], pieces[2].read_bytes()[:-1] + b"\7"), strict=False
    ):
        path.write_bytes(content)  # the last two are cut short, and changed
    total, counted = batches(section, monkeypatch), []
    here = Reader._here
    monkeypatch.setattr(Reader, "_here", lambda self, placed: counted.append(1) or here(self, placed))
    prepare(killed, progress=False)
    assert len(counted) == total - len(pieces) + 3
    assert files(killed.cache_dir, alone.fingerprint) == files(section.cache_dir, alone.fingerprint)


def test_a_piece_belongs_to_its_batch_and_its_work(tmp_path: Path) -> None:
    names = {piece_path(tmp_path, work, packed) for work in ("a", "b") for packed in (b"", b"x", b"y")}
    assert len(names) == 6
    assert read_piece(tmp_path / "nothing") is None


def test_batches_and_results_come_back_as_they_were(tmp_path: Path) -> None:
    texts = ["", "one\u2028line", "\ud800 lone", 'a "quote"\\']
    assert EncodedCodec().unpack(EncodedCodec().pack(texts)) == texts
    encoded = (Encoded(np.arange(5, dtype=np.uint16), 2, 70), Encoded(np.empty(0, dtype=np.uint16), 0, 0))
    write_piece(tmp_path / "it", *EncodedCodec().tensors(encoded))
    kept = read_piece(tmp_path / "it")
    assert kept is not None
    for mine, other in zip(EncodedCodec().result(*kept), encoded, strict=True):
        assert mine.tokens.dtype == other.tokens.dtype and np.array_equal(mine.tokens, other.tokens)
        assert (mine.documents, mine.text_bytes) == (other.documents, other.text_bytes)

    codec = RowsCodec()
    rows = [("f:1", {"b": [1, None, 2.5], "a": {"ü": "\ud800"}}), ("f:2", BadRow("x", "is not there"))]
    back = codec.unpack(codec.pack(rows))
    assert back[0] == rows[0] and list(back[0][1]) == ["b", "a"]
    assert back[1][0] == "f:2" and isinstance(back[1][1], BadRow) and str(back[1][1]) == "x: is not there"
    with pytest.raises(TypeError):
        codec.pack([("f:1", {"a": b"bytes"})])
    for lengths in ((), (3,), (2, 4, 1)):
        given = EncodedRows(
            [np.arange(n) for n in lengths], [np.arange(n) > 0 for n in lengths], [n == 4 for n in lengths]
        )
        given.counts.update({"rows": 7, "dropped": 2})
        others = {"longest": 9, "longest_source": 6, "longest_target": 3, "first_bad": "f:2: x"}
        for name, value in others.items():
            setattr(given, name, value)
        write_piece(tmp_path / f"rows{len(lengths)}", *codec.tensors(given))
        kept = read_piece(tmp_path / f"rows{len(lengths)}")
        assert kept is not None
        found = codec.result(*kept)
        for name in ("tokens", "trained"):
            for mine, other in zip(getattr(found, name), getattr(given, name), strict=True):
                assert mine.dtype == other.dtype and np.array_equal(mine, other)
        assert {field.name for field in fields(found)} == {*others, "tokens", "trained", "held_out", "counts"}
        assert found.held_out == given.held_out and {name: getattr(found, name) for name in others} == others
        assert list(found.counts.items()) == [("rows", 7), ("dropped", 2)]


@pytest.mark.slow
def test_rows_of_two_machines_are_those_of_one_process(tmp_path: Path) -> None:
    generator = random.Random(1)
    lines = [f'{{"prompt": "p {n}", "completion": "{"c " * generator.randint(1, 40)}"}}' for n in range(200)]
    lines[77] = '{"prompt": 3}'
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    section = DataSection(
        source="jsonl",
        path=str(tmp_path / "rows.jsonl"),
        cache_dir=str(tmp_path / "alone"),
        tokenizer="bpe:300",
        sequence_length=64,
        validation_fraction=0.2,
        on_bad_row="skip",
        workers=1,
    )
    finish(program(section, tmp_path, "a", "alone"))
    shared = replace(section, cache_dir=str(tmp_path / "shared"))
    codes, printed = together(shared, tmp_path, "meet", "")
    assert codes == [0, 0], printed
    (here, _), (_, helped) = map(computed, printed)
    assert here + helped == 25 and helped >= 5
    fingerprint = printed[0].split()[0]
    assert files(shared.cache_dir, fingerprint) == files(section.cache_dir, fingerprint)
    assert not Pieces(Path(shared.cache_dir) / fingerprint).folder.exists()
