"""A preparation that is killed goes on where it was: its bytes are those of an undisturbed one."""

import random
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import data.text.prepare
from config.schema import DataSection
from data.corpora.corpus import is_prepared
from data.rows.prepare_rows import RowsCodec
from data.rows.row_preparation import EncodedRows
from data.sources.row_formats import BadRow
from data.text import batch_results
from data.text.batch_results import kept_folder, read_result, result_path, write_result
from data.text.prepare import prepare
from tests.data.test_prepare import texts
from tests.support.jobs.launches import finish, start

# A program: prepares with `section`, and prints how many batches its workers computed. argv[1]: after how many results
# it is killed, 0: never.
PROGRAM = """
import os, signal, sys
import data.text.batch_results, data.text.prepare, data.rows.prepare_rows, data.rows.row_preparation
from config.schema import DataSection
if __name__ == "__main__":
    data.text.prepare.BATCH_CHARACTERS = 2000
    data.rows.row_preparation.BATCH_ROWS, data.rows.prepare_rows._BATCHES_HERE = 8, 2
    computed, results, submit = [], data.text.batch_results.results, data.text.batch_results.Workers.submit

    def counted(pool, function, *arguments):
        computed.extend([1] * (function is data.text.batch_results._compute))
        return submit(pool, function, *arguments)

    def killed(*arguments):
        for number, result in enumerate(results(*arguments), start=1):
            if number == int(sys.argv[1]):
                os.kill(os.getpid(), signal.SIGKILL)
            yield result

    data.text.batch_results.Workers.submit = counted
    data.text.prepare.results = data.rows.prepare_rows.results = killed
    section = DataSection(**SECTION)
    make = data.text.prepare.prepare if section.source == "text" else data.rows.prepare_rows.prepare_rows
    corpus = make(section, progress=False)
    print(corpus.fingerprint, len(computed))
"""


__all__ = ["texts"]


@pytest.fixture
def section(texts: Path, tmp_path: Path) -> DataSection:
    """A section of a hundred documents, of an empty one and of one that is no text."""
    (texts / "050b.txt").touch()
    (texts / "060b.txt").write_bytes(b"\xff")
    folders = {"path": str(texts), "cache_dir": str(tmp_path / "alone")}
    return DataSection(source="text", **folders, tokenizer="bpe:300", validation_fraction=0.2, workers=1)


def files(cache: str | Path, fingerprint: str) -> dict[str, bytes]:
    """Everything in the folder of a corpus."""
    folder = Path(cache) / fingerprint
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def program(section: DataSection, tmp_path: Path, killed_after: int = 0) -> list[str]:
    given = {key: getattr(section, key) for key in DataSection.__dataclass_fields__}
    (tmp_path / "program.py").write_text(PROGRAM.replace("**SECTION", f"**{given!r}"), encoding="utf-8")
    return ["python", str(tmp_path / "program.py"), str(killed_after)]


def computed(printed: str) -> int:
    """Batches that a process computed."""
    return int(printed.splitlines()[-1].split()[1])


def batches(section: DataSection, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(data.text.prepare, "BATCH_CHARACTERS", 2000)
    return len(list(data.text.prepare._batches(data.text.prepare.open_source(section).documents(Counter()))))


def test_a_killed_preparation_goes_on_and_damaged_results_are_computed_again(section, tmp_path, monkeypatch) -> None:
    alone = prepare(section, progress=False)
    killed = replace(section, cache_dir=str(tmp_path / "killed"))
    process = start(program(killed, tmp_path, killed_after=6))
    process.communicate()
    assert process.returncode == -9
    kept = sorted(kept_folder(Path(killed.cache_dir) / alone.fingerprint).rglob("??/*"))
    assert len(kept) >= 6 and not is_prepared(Path(killed.cache_dir) / alone.fingerprint)
    for path, content in zip(kept, (b"", kept[1].read_bytes()[:-1], kept[2].read_bytes()[:-1] + b"\7"), strict=False):
        path.write_bytes(content)  # the last two are cut short, and changed
    total, counted = batches(section, monkeypatch), []
    submit = batch_results.Workers.submit
    monkeypatch.setattr(
        batch_results.Workers, "submit", lambda pool, *given: counted.append(given[0]) or submit(pool, *given)
    )
    prepare(killed, progress=False)
    assert counted.count(batch_results._compute) == total - len(kept) + 3
    assert files(killed.cache_dir, alone.fingerprint) == files(section.cache_dir, alone.fingerprint)
    assert not list(Path(killed.cache_dir).glob("*.p*")), "neither partial folders nor kept results are left"


def test_a_result_belongs_to_its_batch_and_its_work(tmp_path: Path) -> None:
    names = {result_path(tmp_path, work, packed) for work in ("a", "b") for packed in (b"", b"x", b"y")}
    assert len(names) == 6
    assert read_result(tmp_path / "nothing") is None


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    codec = RowsCodec()
    assert codec.pack([("f:2", BadRow("x", "is not there"))]) != codec.pack([("f:2", {"x": "is not there"})])
    with pytest.raises(TypeError):
        codec.pack([("f:1", {"a": b"bytes"})])
    for lengths in ((), (3,), (2, 4, 1)):
        kept_rows = [{"tokens": np.arange(n), "trained": (np.arange(n) > 0).astype(np.uint8)} for n in lengths]
        given = EncodedRows(kept_rows, [n == 4 for n in lengths])
        given.counts.update({"rows": 7, "dropped": 2})
        others = {"longest": 9, "longest_source": 6, "longest_target": 3, "bad": {"x: is empty": [2, "f:2", "f:5"]}}
        for name, value in others.items():
            setattr(given, name, value)
        write_result(tmp_path / f"rows{len(lengths)}", *codec.tensors(given))
        kept = read_result(tmp_path / f"rows{len(lengths)}")
        assert kept is not None
        found = codec.result(*kept)
        for mine, other in zip(found.rows, given.rows, strict=True):
            for name in ("tokens", "trained"):
                assert mine[name].dtype == other[name].dtype and np.array_equal(mine[name], other[name])
        assert {field.name for field in fields(found)} == {*others, "rows", "held_out", "counts"}
        assert found.held_out == given.held_out and {name: getattr(found, name) for name in others} == others
        assert list(found.counts.items()) == [("rows", 7), ("dropped", 2)]


@pytest.mark.slow
def test_rows_of_a_killed_preparation_are_those_of_an_undisturbed_one(tmp_path: Path) -> None:
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
    fingerprint, count = finish(program(section, tmp_path)).splitlines()[-1].split()
    assert int(count) == 25
    killed = replace(section, cache_dir=str(tmp_path / "killed"))
    start(program(killed, tmp_path, killed_after=10)).communicate()
    assert computed(finish(program(killed, tmp_path))) <= 15
    assert files(killed.cache_dir, fingerprint) == files(section.cache_dir, fingerprint)
    assert not kept_folder(Path(killed.cache_dir) / fingerprint).exists()
