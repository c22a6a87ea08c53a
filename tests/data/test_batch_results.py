"""A preparation that is killed goes on where it was: its bytes are those of an undisturbed one."""

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import data.text.prepare
from config.schema import DataSection
from data.array_file import read_arrays, write_arrays
from data.corpora.corpus import is_prepared
from data.rows import prepare_rows, row_preparation
from data.rows.row_preparation import EncodedRows
from data.sources.row_formats import BadRow
from data.text import batch_results
from data.text.batch_results import kept_folder, result_path
from data.text.prepare import prepare
from tests.data.test_prepare import texts
from tests.support.jobs.launches import start

# A program: prepares with `section`, and is killed after six results.
PROGRAM = """
import os, signal
import data.text.prepare
from config.schema import DataSection
if __name__ == "__main__":
    data.text.prepare.BATCH_CHARACTERS = 2000
    results = data.text.prepare.results

    def killed(*arguments):
        for number, result in enumerate(results(*arguments), start=1):
            if number == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            yield result

    data.text.prepare.results = killed
    data.text.prepare.prepare(DataSection(**SECTION), progress=False)
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


def program(section: DataSection, tmp_path: Path) -> list[str]:
    given = {key: getattr(section, key) for key in DataSection.__dataclass_fields__}
    (tmp_path / "program.py").write_text(PROGRAM.replace("**SECTION", f"**{given!r}"), encoding="utf-8")
    return ["python", str(tmp_path / "program.py")]


def batches(section: DataSection, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(data.text.prepare, "BATCH_CHARACTERS", 2000)
    return len(list(data.text.prepare._batches(data.text.prepare.open_source(section).documents(Counter()))))


def test_a_killed_preparation_goes_on_and_damaged_results_are_computed_again(section, tmp_path, monkeypatch) -> None:
    alone = prepare(section, progress=False)
    killed = replace(section, cache_dir=str(tmp_path / "killed"))
    process = start(program(killed, tmp_path))
    process.communicate()
    assert process.returncode == -9
    kept = sorted(kept_folder(Path(killed.cache_dir) / alone.fingerprint).rglob("??/[!.]*"))
    assert len(kept) >= 6 and not is_prepared(Path(killed.cache_dir) / alone.fingerprint)
    for path, content in zip(kept, (b"", kept[1].read_bytes()[:-1], kept[2].read_bytes()[:-1] + b"\7"), strict=False):
        path.write_bytes(content)  # the last two are cut short, and changed
    total, counted = batches(section, monkeypatch), []
    submit = batch_results.Workers.submit
    monkeypatch.setattr(
        batch_results.Workers, "submit", lambda pool, item: counted.append(type(item)) or submit(pool, item)
    )
    prepare(killed, progress=False)
    assert counted.count(tuple) == total - len(kept) + 3  # the sample of a tokenizer is a list
    assert files(killed.cache_dir, alone.fingerprint) == files(section.cache_dir, alone.fingerprint)
    assert not list(Path(killed.cache_dir).glob("*.p*")), "neither partial folders nor kept results are left"


def test_a_result_belongs_to_its_batch_and_its_work(tmp_path: Path) -> None:
    batches = ([], ["x"], [("f:2", BadRow("x", "is missing"))], [("f:2", {"x": "is missing"})], [("f:2", {"x": b"y"})])
    assert len({result_path(tmp_path, work, batch) for work in ("a", "b") for batch in batches}) == 10
    assert read_arrays(tmp_path / "nothing") is None


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    for lengths in ((), (3,), (2, 4, 1)):
        kept_rows = [{"tokens": np.arange(n), "trained": (np.arange(n) > 0).astype(np.uint8)} for n in lengths]
        given = EncodedRows(kept_rows, [n == 4 for n in lengths])
        given.counts.update({"rows": 7, "dropped": 2})
        given.longest.update({"row": 9, "source": 6})
        given.bad = {"x: is empty": [2, "f:2", "f:5"]}
        write_arrays(tmp_path / f"rows{len(lengths)}", given.packed(), {})
        kept = read_arrays(tmp_path / f"rows{len(lengths)}")
        assert kept is not None
        found = EncodedRows.unpacked(kept[0])
        for mine, other in zip(found.rows, given.rows, strict=True):
            for name in ("tokens", "trained"):
                assert mine[name].dtype == other[name].dtype and np.array_equal(mine[name], other[name])
        assert {field.name for field in fields(found)} == {"rows", "held_out", "counts", "longest", "bad"}
        assert (found.held_out, found.longest, found.bad) == (given.held_out, given.longest, given.bad)
        assert list(found.counts.items()) == [("rows", 7), ("dropped", 2)]


@pytest.mark.slow
def test_rows_from_workers_are_those_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f'{{"prompt": "p {n}", "completion": "{"c " * (n % 40 + 1)}"}}' for n in range(200)]
    lines[77] = '{"prompt": 3}'
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    given = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl"), "tokenizer": "bpe:300", "on_bad_row": "skip"}
    given |= {"sequence_length": 64, "validation_fraction": 0.2, "workers": 2, "cache_dir": str(tmp_path / "here")}
    section = DataSection(**given)  # type: ignore[arg-type]
    fingerprint = prepare_rows.prepare_rows(section, progress=False).fingerprint
    monkeypatch.setattr(row_preparation, "BATCH_ROWS", 8)
    monkeypatch.setattr(prepare_rows, "_BATCHES_HERE", 2)
    prepare_rows.prepare_rows(replace(section, cache_dir=str(tmp_path / "workers")), progress=False)
    assert files(tmp_path / "workers", fingerprint) == files(tmp_path / "here", fingerprint)
