"""Preparation: exact content and holdout, done once, whatever the workers, killed or not; its folder, its progress."""

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

import data.text.prepare
from config.errors import UserError
from config.schema import DataSection
from data.array_file import read_arrays, write_arrays
from data.corpora.corpus import INDEX, SPLITS, Corpus, is_prepared
from data.rows import packing, prepare_rows, row_preparation
from data.rows.row_preparation import EncodedRows
from data.sources.row_formats import BadRow
from data.sources.sources import open_source
from data.text import batch_results
from data.text.batch_results import kept_folder, result_path
from data.text.cache_folder import cache_folder
from data.text.encode import is_validation
from data.text.holdout import TAIL
from data.text.preparation_progress import Display, ProgressFile, read_progress
from data.text.prepare import corpus_fingerprint, prepare
from data.text.tokenizer import load_tokenizer
from tests.support.jobs.launches import runs, start, wait_until
from tests.support.refusals import refused

# A program: prepares argv[1] into argv[2], spending argv[3] seconds more than needed before it publishes, and prints
# the fingerprint and how often this process prepared.
PREPARE = """
import sys
import time
import data.text.prepare
from config.schema import DataSection
if __name__ == "__main__":
    data.text.prepare.BATCH_CHARACTERS = 2000
    fill, filled = data.text.prepare._fill, []
    def counted(*arguments, **named):
        filled.append(1)
        fill(*arguments, **named)
        time.sleep(float(sys.argv[3]))
    data.text.prepare._fill = counted
    section = DataSection(source="text", path=sys.argv[1], cache_dir=sys.argv[2], tokenizer="bytes", workers=2)
    corpus = data.text.prepare.prepare(section, progress=True)
    print(corpus.fingerprint, len(filled))
"""


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A hundred small documents."""
    folder = tmp_path / "texts"
    folder.mkdir()
    generator = random.Random(0)
    for number in range(100):
        words = [generator.choice(["alpha", "beta", "γάμμα", "delta\n"]) for _ in range(generator.randint(1, 300))]
        (folder / f"{number:03d}.txt").write_bytes(" ".join(words).encode())
    return folder


@pytest.fixture
def section(texts: Path, tmp_path: Path) -> DataSection:
    folders = {"path": str(texts), "cache_dir": str(tmp_path / "cache")}
    return DataSection(source="text", **folders, tokenizer="bytes", validation_fraction=0.2, workers=1)


def documents(corpus: Corpus, split: str) -> list[str]:
    """The documents of a split, decoded from its shards."""
    tokenizer = load_tokenizer(corpus.tokenizer_folder)
    shards = getattr(corpus, split).shards
    tokens = np.concatenate([np.empty(0, dtype=np.int64), *[shard.array for shard in shards]])
    ends = np.flatnonzero(tokens == corpus.end_of_document)
    assert len(tokens) == (ends[-1] + 1 if len(ends) else 0)
    return [tokenizer.decode(part[: len(part) - 1]) for part in np.split(tokens, ends + 1)[:-1]]


def contents(corpus: Corpus) -> str:
    """The index: it holds the sha256 of every shard's tokens, which opening the corpus has just verified."""
    return (corpus.folder / INDEX).read_text(encoding="utf-8")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_every_document_comes_back_once_in_its_split(section: DataSection, texts: Path, tokenizer: str) -> None:
    corpus = prepare(replace(section, tokenizer=tokenizer), progress=False)
    originals = [path.read_bytes().decode() for path in sorted(texts.iterdir())]
    assert documents(corpus, "train") == [text for text in originals if not is_validation(text, 0.2)]
    assert documents(corpus, "validation") == [text for text in originals if is_validation(text, 0.2)]
    assert corpus.train_documents + corpus.validation_documents == 100
    index = json.loads(contents(corpus))["content"]
    sizes = [index[split]["text_bytes"] for split in ("train", "validation")]
    assert sum(sizes) == sum(path.stat().st_size for path in texts.iterdir())
    assert 0 < corpus.validation_documents < corpus.train_documents


def test_tokens_do_not_depend_on_workers_or_batches_and_shards_are_cut_at_their_size(section, tmp_path, monkeypatch):
    monkeypatch.setattr(data.text.prepare, "SHARD_TOKENS", 10_000)
    prepared = []
    for workers, batch in ((1, 1 << 20), (3, 500)):
        monkeypatch.setattr(data.text.prepare, "BATCH_CHARACTERS", batch)
        changed = replace(section, workers=workers, cache_dir=str(tmp_path / f"cache{workers}"))
        prepared.append(prepare(changed, progress=False))
    first, second = prepared
    assert first.fingerprint == second.fingerprint
    assert contents(first) == contents(second)
    sizes = [shard.tokens for shard in first.train.shards]
    assert len(sizes) > 3
    assert set(sizes[:-1]) == {10_000}


def tokens(corpus: Corpus) -> dict[str, bytes]:
    """The tokens of each split."""
    return {split: b"".join(shard.array.tobytes() for shard in getattr(corpus, split).shards) for split in SPLITS}


@pytest.mark.parametrize(("separator", "for_encoder"), [("\n\n<|endoftext|>\n", False), ("ßλ", True)])
def test_one_split_file_is_prepared_as_a_file_for_each_document(
    section: DataSection, texts: Path, tmp_path: Path, separator: str, for_encoder: bool, monkeypatch
) -> None:
    monkeypatch.setattr("data.sources.files.BLOCK_BYTES", 7)
    whole = prepare(replace(section, tokenizer="bpe:300"), progress=False, for_encoder=for_encoder)
    originals = [path.read_bytes() for path in sorted(texts.iterdir())]
    empty = [b"", *originals[:50], b"", *originals[50:], b""]
    (tmp_path / "one.txt").write_bytes(separator.encode().join(empty))
    split = replace(section, path=str(tmp_path / "one.txt"), document_separator=separator, tokenizer="bpe:300")
    corpus = prepare(split, progress=False, for_encoder=for_encoder)
    assert tokens(corpus) == tokens(whole)
    assert all(tokens(corpus).values()) and corpus.fingerprint != whole.fingerprint
    assert corpus.skipped == {"no text": 3}
    assert (corpus.train_documents, corpus.validation_documents) == (whole.train_documents, whole.validation_documents)
    others = [open_source(replace(split, document_separator=other)) for other in (None, "\n")]
    assert len({corpus.fingerprint, *(corpus_fingerprint(split, other) for other in others)}) == 3


@pytest.mark.parametrize(("separator", "text", "byte"), [(None, b"ab\xff", 2), ("\n\n", b"ab\n\ncd\n\nef\xff", 10)])
def test_documents_left_out_are_a_note_with_the_first_place(section, texts, separator, text, byte) -> None:
    (texts / "099.txt").write_bytes(text)
    corpus = prepare(replace(section, document_separator=separator), progress=False)
    assert corpus.notes == (f"data: documents left out: 1 not utf-8 (the first: {texts / '099.txt'}: byte {byte})",)


def test_a_separator_that_is_nowhere_is_a_mistake(section: DataSection) -> None:
    with pytest.raises(UserError, match=r'data.document_separator="\\\\n": is not in data.path=') as caught:
        prepare(replace(section, document_separator="\\n"), progress=False)
    assert "\n" not in str(caught.value)


def test_the_second_call_reuses_and_the_fingerprint_follows_what_matters(section, texts, monkeypatch):
    corpus = prepare(section, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(data.text.prepare, "_prepare_locked", None)
        again = prepare(replace(section, workers=2, verify=False, sequence_length=64), progress=False)
    assert again.folder == corpus.folder

    def fingerprint(**changes: object) -> str:
        changed = replace(section, **changes)  # type: ignore[arg-type]
        return corpus_fingerprint(changed, open_source(changed))

    changes = {"tokenizer": "bpe:300", "validation_fraction": 0.3, "path": str(texts / "*0.txt"), "source": "hub"}
    seen = {corpus.fingerprint, *(fingerprint(**{key: value}) for key, value in changes.items())}
    (texts / "000.txt").write_text("changed")
    seen.add(fingerprint())
    assert len(seen) == 6


def test_no_validation(section: DataSection) -> None:
    corpus = prepare(replace(section, validation_fraction=0.0), progress=False)
    assert corpus.validation.tokens == corpus.validation.sequences(8) == corpus.validation_documents == 0
    assert corpus.train_documents == 100


def test_workers_end_when_their_parent_is_killed(texts: Path, tmp_path: Path) -> None:
    program = (
        "import time\nfrom functools import partial\nfrom data.text.workers import Workers\n"
        "workers = Workers(1, partial, eval)\n"
        "print(workers.submit('__import__(\"os\").getpid()').result(), flush=True)\n"
        "workers.submit('__import__(\"time\").sleep(60)')\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        os.kill(worker, 0)
        process.kill()
    wait_until(lambda: not runs(worker))


def test_two_processes_at_once_prepare_it_once(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "prepare.py").write_text(PREPARE, encoding="utf-8")
    command = ["python", str(tmp_path / "prepare.py"), str(texts), str(tmp_path / "shared"), "1.5"]
    running = [start(command) for _ in range(2)]
    finished = [process.communicate(timeout=120)[0].splitlines() for process in running]
    answers = [lines[-1].split() for lines in finished]
    assert answers[0][0] == answers[1][0]
    assert sorted(filled for _, filled in answers) == ["0", "1"]
    # Both were asked to show progress: the one that waits sees how far the other is, and nothing else is said.
    for *lines, _ in finished:
        assert lines[-1].startswith(f"data: prepared data.path={texts} in ")
        assert lines[0].startswith(("data: making the tokenizer", "data: tokenizing"))
        assert all(line.startswith("data: ") for line in lines), lines


def test_waiting_ends_with_what_to_do(section: DataSection) -> None:
    fingerprint = corpus_fingerprint(section, open_source(section))
    Path(section.cache_dir).mkdir()
    with FileLock(f"{section.cache_dir}/{fingerprint}.lock"):
        start = time.monotonic()
        with pytest.raises(UserError, match=r"data.wait_minutes=0.005: another process is still preparing .*\.lock"):
            prepare(replace(section, wait_minutes=0.005), progress=False)
        assert time.monotonic() - start < 5
    assert prepare(section, progress=False).train_documents


def test_a_published_corpus_is_opened_while_its_holder_still_deletes_kept_batches(section: DataSection) -> None:
    corpus = prepare(section, progress=False)
    hidden = corpus.folder.rename(corpus.folder.with_name("hidden"))
    with FileLock(f"{corpus.folder}.lock"):
        publish = threading.Timer(0.3, hidden.rename, [corpus.folder])
        publish.start()
        assert prepare(replace(section, wait_minutes=0.05), progress=False).fingerprint == corpus.fingerprint
        publish.join()


def test_those_that_wait_for_hours_ask_for_the_lock_once_in_five_seconds(
    section: DataSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    monkeypatch.setattr(data.text.prepare, "time", clock)
    fingerprint = corpus_fingerprint(section, open_source(section))
    Path(section.cache_dir).mkdir()
    with FileLock(f"{section.cache_dir}/{fingerprint}.lock"), pytest.raises(UserError, match="without progress"):
        prepare(replace(section, wait_minutes=60.0), progress=False)
    assert max(waits) == 5 and len(waits) < 3600 / 5 + 100
    assert waits[0] < 0.1  # a small corpus is soon there


def test_packing_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"prompt": f"question {number}?", "completion": "yes"}) for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    section = DataSection(source="jsonl", path=str(tmp_path / "rows.jsonl"), tokenizer="bytes", packing="best_fit")
    said: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ProgressFile, "__call__", lambda report, *told: said.append(told))
    monkeypatch.setattr(packing, "BETWEEN_REPORTS", 10)
    given: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "sequence_length": 64, "validation_fraction": 0.0}
    prepare_rows.prepare_rows(replace(section, **given), progress=False)
    done = [tokens for what, *tokens in said if what == "packing"]
    assert len(done) == 4 and done == sorted(done)


def test_leftovers_and_interrupted_deletions_are_removed_but_others_work_is_not(section: DataSection) -> None:
    fingerprint = corpus_fingerprint(section, open_source(section))
    cache = Path(section.cache_dir)
    for name in (f"{fingerprint}.partial-1", fingerprint, "0" * 20 + ".partial-1"):
        (cache / name).mkdir(parents=True)
        (cache / name / "train-00000.safetensors").write_text("half")
    corpus = prepare(section, progress=False)
    assert corpus.train_documents > 0
    assert not (cache / f"{fingerprint}.partial-1").exists()
    assert (cache / ("0" * 20 + ".partial-1")).exists()


def test_an_error_while_preparing_leaves_nothing(section: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(data.text.prepare, "write_shard", full)
        with pytest.raises(UserError, match=r"data.cache_dir=.*No space left"):
            prepare(section, progress=False)
    assert not [path for path in Path(section.cache_dir).iterdir() if path.suffix != ".lock"]
    assert prepare(section, progress=False).train_documents > 0


def test_nothing_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").write_bytes(b"\xff")
    section = DataSection(source="text", path=str(tmp_path), cache_dir=str(tmp_path / "cache"), tokenizer="bytes")
    with pytest.raises(UserError, match=r"holds no document with text \(left out: 1 no text, 1 not utf-8\)"):
        prepare(section, progress=False)
    (tmp_path / "a.txt").write_text("one document")
    with pytest.raises(UserError, match=r"data.validation_fraction=0.999999: all 1 documents"):
        prepare(replace(section, validation_fraction=0.999999, hold_out="documents"), progress=False)
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"a.jsonl: holds no document: it is empty. Write some"):
        prepare(replace(section, source="jsonl", path=str(tmp_path / "a.jsonl")), progress=False)
    assert not list((tmp_path / "cache").glob("*.partial-*"))


def test_a_cache_folder_that_cannot_be(section: DataSection, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data.cache_dir=.*cannot be written"):
        prepare(replace(section, cache_dir=str(tmp_path / "file" / "cache")), progress=False)


def test_a_line_comes_when_it_says_something_new_and_seldom_else(tmp_path, monkeypatch, capsys) -> None:
    seconds = itertools.count(start=1000, step=0.4)
    monkeypatch.setattr("data.text.preparation_progress.time.monotonic", lambda: float(next(seconds)))
    (tmp_path / "corpus.partial-1").mkdir()
    with ProgressFile(tmp_path / "corpus.partial-1", Display("chats", active=True)) as report:
        for _ in range(110):
            report("making the tokenizer for")
        for done in range(110):
            report("tokenizing", done * 10**6, 10**9)
        assert read_progress(tmp_path / "corpus") == "data: tokenizing chats, 109.0 of 1000.0 MB"
    assert read_progress(tmp_path / "corpus") == ""
    lines = capsys.readouterr().err.splitlines()
    waiting = [line for line in lines if line == "data: making the tokenizer for chats"]
    moving = [line for line in lines if line.startswith("data: tokenizing chats")]
    assert 1 < len(waiting) < 6 and 10 < len(moving) < 40 and len(lines) == len(waiting) + len(moving)
    assert len(set(moving)) == len(moving)


def test_nothing_is_printed_by_those_that_are_not_to_show_it(capsys) -> None:
    display = Display("chats", active=False)
    display.show("data: tokenizing chats")
    display.finish()
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("home", ["/proc/none", "/etc/hostname"])
def test_a_home_that_cannot_be_written(temporary: Path, monkeypatch, capsys, home: str) -> None:
    monkeypatch.setenv("HOME", home)
    own = temporary / f"mantissa-{os.getuid()}"
    assert cache_folder(DataSection(), "f", say=True) == own / "f"
    assert own.stat().st_mode & 0o777 == 0o700
    (line,) = capsys.readouterr().out.splitlines()
    assert home in line and f"prepared data is kept in {own}" in line and "data.cache_dir" in line
    assert cache_folder(DataSection(), "f", say=False) == own / "f", "again, as another rank or a later run"
    assert capsys.readouterr().out == ""


def test_a_home_that_can_be_written_or_holds_the_data(temporary: Path, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "home/.cache/mantissa/f"
    assert cache_folder(DataSection(), "f", say=True) == folder
    folder.mkdir()
    (folder / INDEX).touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert cache_folder(DataSection(), "f", say=True) == folder
    assert cache_folder(DataSection(), "g", say=True).is_relative_to(temporary)
    assert capsys.readouterr().out.count("prepared data is kept in") == 1


def test_a_folder_that_was_asked_for_stays_that_folder(temporary: Path) -> None:
    assert cache_folder(DataSection(cache_dir="/proc/none"), "f", say=True) == Path("/proc/none/f")
    with pytest.raises(UserError, match="data.cache_dir=~nobody-of-this-name/c: "):
        cache_folder(DataSection(cache_dir="~nobody-of-this-name/c"), "f", say=True)


def test_nobody_elses_folder_is_taken(temporary: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/proc/none")
    (tmp_path / "theirs").mkdir()
    (temporary / f"mantissa-{os.getuid()}").symlink_to(tmp_path / "theirs")
    assert "not a folder of this user's" in refused(cache_folder, DataSection(), "f", say=True)


def test_nothing_that_can_be_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/proc/none")
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    assert "No such file or directory: '/proc/none/mantissa-" in refused(cache_folder, DataSection(), "f", say=True)


# A program: prepares with `damaged_section`, and is killed after six results.
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


@pytest.fixture
def damaged_section(texts: Path, tmp_path: Path) -> DataSection:
    """A damaged_section of a hundred documents, of an empty one and of one that is no text."""
    (texts / "050b.txt").touch()
    (texts / "060b.txt").write_bytes(b"\xff")
    folders = {"path": str(texts), "cache_dir": str(tmp_path / "alone")}
    return DataSection(source="text", **folders, tokenizer="bpe:300", validation_fraction=0.2, workers=1)


def files(cache: str | Path, fingerprint: str) -> dict[str, bytes]:
    """Everything in the folder of a corpus."""
    folder = Path(cache) / fingerprint
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def program(damaged_section: DataSection, tmp_path: Path) -> list[str]:
    given = {key: getattr(damaged_section, key) for key in DataSection.__dataclass_fields__}
    (tmp_path / "program.py").write_text(PROGRAM.replace("**SECTION", f"**{given!r}"), encoding="utf-8")
    return ["python", str(tmp_path / "program.py")]


def batches(damaged_section: DataSection, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(data.text.prepare, "BATCH_CHARACTERS", 2000)
    return len(list(data.text.prepare._batches(data.text.prepare.open_source(damaged_section).documents(Counter()))))


def test_a_killed_preparation_goes_on_and_damaged_results_are_computed_again(damaged_section, tmp_path, monkeypatch):
    alone = prepare(damaged_section, progress=False)
    killed = replace(damaged_section, cache_dir=str(tmp_path / "killed"))
    process = start(program(killed, tmp_path))
    process.communicate()
    assert process.returncode == -9
    kept = sorted(kept_folder(Path(killed.cache_dir) / alone.fingerprint).rglob("??/[!.]*"))
    assert len(kept) >= 6 and not is_prepared(Path(killed.cache_dir) / alone.fingerprint)
    for path, content in zip(kept, (b"", kept[1].read_bytes()[:-1], kept[2].read_bytes()[:-1] + b"\7"), strict=False):
        path.write_bytes(content)  # the last two are cut short, and changed
    total, counted = batches(damaged_section, monkeypatch), []
    submit = batch_results.Workers.submit
    monkeypatch.setattr(
        batch_results.Workers, "submit", lambda pool, item: counted.append(type(item)) or submit(pool, item)
    )
    prepare(killed, progress=False)
    assert counted.count(tuple) == total - len(kept) + 3  # the sample of a tokenizer is a list
    assert files(killed.cache_dir, alone.fingerprint) == files(damaged_section.cache_dir, alone.fingerprint)
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
    lines[77:79] = '{"prompt": 3}', '{"prompt": "not JSON'
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    given = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl"), "tokenizer": "bpe:300", "on_bad_row": "skip"}
    given |= {"sequence_length": 64, "validation_fraction": 0.2, "workers": 2, "cache_dir": str(tmp_path / "here")}
    section = DataSection(**given)  # type: ignore[arg-type]
    fingerprint = prepare_rows.prepare_rows(section, progress=False).fingerprint
    monkeypatch.setattr(row_preparation, "BATCH_ROWS", 8)
    monkeypatch.setattr(prepare_rows, "_BATCHES_HERE", 2)
    prepare_rows.prepare_rows(replace(section, cache_dir=str(tmp_path / "workers")), progress=False)
    assert files(tmp_path / "workers", fingerprint) == files(tmp_path / "here", fingerprint)


LENGTH = 64


def text_of(size: int, seed: int, *, held_out: bool = False, fraction: float = 0.02) -> str:
    """A document of that size that the hash draws for validation, or does not."""
    generator = random.Random(seed)
    while True:
        text = "".join(generator.choice("abcdefgh \n") for _ in range(size))
        if is_validation(text, fraction) is held_out:
            return text


@pytest.fixture
def section_of(tmp_path: Path) -> Any:
    """section_of(texts) is a DataSection of them, one file each."""

    def section_of(*texts: str, **changes: Any) -> DataSection:
        folder = tmp_path / "texts"
        folder.mkdir()
        for number, text in enumerate(texts):
            (folder / f"{number}.txt").write_text(text)
        given = {"source": "text", "path": str(folder), "cache_dir": str(tmp_path / "cache"), "workers": 1}
        given |= {"tokenizer": "bytes", "validation_fraction": 0.02, "sequence_length": LENGTH}
        return DataSection(**{**given, **changes})

    return section_of


def tokens_of(corpus: Corpus, split: str) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.uint16), *[shard.array for shard in getattr(corpus, split).shards]])


def test_the_end_of_a_single_text_is_held_out(section_of):
    data = section_of(text_of(20_000, 0))
    corpus = prepare(data, progress=False)
    whole = prepare(replace(data, hold_out="documents"), progress=False)
    assert whole.validation.tokens == 0 and whole.fingerprint + TAIL == corpus.fingerprint
    assert whole.folder == corpus.folder  # nothing is prepared again
    train, validation = tokens_of(corpus, "train"), tokens_of(corpus, "validation")
    assert np.array_equal(np.concatenate([train, validation]), tokens_of(whole, "train"))
    # 2% of 20,001 tokens_of are 6 sequences; training ends on the border of one
    assert corpus.validation.sequences(LENGTH) == 6 and corpus.tail_tokens == len(validation) < 7 * LENGTH + 2
    assert (len(train) - 1) % LENGTH == 0
    assert corpus.train.sequences(LENGTH) == (len(train) - 1) // LENGTH
    again = prepare(data, progress=False)
    assert np.array_equal(tokens_of(again, "validation"), validation) and again.fingerprint == corpus.fingerprint


def test_of_several_texts_the_longest_is_cut_also_where_it_is_in_two_shards(section_of, monkeypatch):
    monkeypatch.setattr(data.text.prepare, "SHARD_TOKENS", 9_000)
    texts = [text_of(size, seed) for seed, size in enumerate((1000, 8_100, 2000))]
    corpus = prepare(section_of(*texts, validation_fraction=0.02, sequence_length=16), progress=False)
    end = sum(len(text) + 1 for text in texts[:2])
    whole = section_again(corpus, validation_fraction=0.02, hold_out="documents")
    everything = np.concatenate([tokens_of(prepare(whole, progress=False), "train")])
    cut = end - corpus.tail_tokens
    assert len(corpus.train.shards) == 2 and len(corpus.validation.shards) == 2  # 9,000 is inside the tail
    assert cut < 9_000 < end
    assert np.array_equal(tokens_of(corpus, "validation"), everything[cut:end])
    assert np.array_equal(tokens_of(corpus, "train"), np.concatenate([everything[:cut], everything[end:]]))
    windows = corpus.train.read(np.arange(corpus.train.sequences(16)), 16)
    held = {bytes(window) for window in corpus.validation.read(np.arange(corpus.validation.sequences(16)), 16)}
    assert not held & {bytes(window) for window in windows}


def section_again(corpus: Corpus, **changes: Any) -> DataSection:
    """The texts of a corpus, prepared otherwise."""
    folders = {"path": str(corpus.folder.parent.parent / "texts"), "cache_dir": str(corpus.folder.parent)}
    return DataSection(source="text", **{**folders, "tokenizer": "bytes", **changes})


def test_a_single_text_that_was_drawn_for_validation_is_trained_on(section_of):
    data = section_of(text_of(20_000, 0, held_out=True))
    corpus = prepare(data, progress=False)
    assert corpus.train.sequences(LENGTH) > 100 and corpus.validation.sequences(LENGTH) == 6
    with pytest.raises(UserError, match="all 1 documents of .* were drawn for validation"):
        prepare(replace(data, hold_out="documents", cache_dir=f"{data.cache_dir}/other"), progress=False)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_where_a_document_is_held_out_nothing_changes(section_of, tokenizer):
    texts = [text_of(5_000, seed) for seed in range(3)] + [text_of(300, 9, held_out=True)]
    corpus = prepare(section_of(*texts, tokenizer=tokenizer), progress=False)
    assert corpus.validation_documents == 1 and corpus.tail_tokens == 0
    assert corpus.fingerprint == corpus.folder.name
    without = section_again(corpus, tokenizer=tokenizer, validation_fraction=0.0)
    assert prepare(without, progress=False).tail_tokens == 0


def test_a_text_too_short_to_cut_is_left_whole(section_of):
    corpus = prepare(section_of(text_of(2 * LENGTH, 0)), progress=False)
    assert corpus.validation.tokens == 0 and corpus.tail_tokens == 0 and corpus.train.sequences(LENGTH) == 2


def test_a_fraction_never_takes_more_than_half(section_of):
    corpus = prepare(section_of(text_of(10_000, 3, fraction=0.9), validation_fraction=0.9), progress=False)
    assert corpus.validation.tokens <= 5_000 + LENGTH < corpus.train.tokens + 2 * LENGTH
