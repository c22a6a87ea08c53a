"""Every source, with small local files read in blocks of any size, and every mistake a user can make with one."""

import bz2
import gzip
import io
import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data.sources.files
import data.sources.sources
from config.errors import UserError
from config.load import load_config
from config.schema import DataSection, ValidationSection
from data.corpora.mix import section_of
from data.sources import file_rows
from data.sources.files import pieces
from data.sources.sources import open_source
from tests.support.refusals import refused
from tests.support.rows.jsonl import write_jsonl

TEXTS = ["first\n", "zweites Dokument ü\r\n", "third \x00 with a null", "four\u2028th"]


def section(source: str, path: Path | str | None, **more: str) -> DataSection:
    return replace(DataSection(), source=source, path=None if path is None else str(path), **more)  # type: ignore[arg-type]


def read(data: DataSection) -> tuple[list[str], dict[str, int]]:
    skipped: Counter[str] = Counter()
    return list(open_source(data).documents(skipped)), dict(skipped)


def test_text_is_one_document_a_file_sorted_exact_and_bad_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, text in zip(["a.txt", "b/a.md", "b/b", "c.txt"], TEXTS, strict=True):
        (tmp_path / name).write_text(text, encoding="utf-8-sig" if name == "c.txt" else "utf-8", newline="")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes("Käse".encode("latin-1"))
    (tmp_path / ".hidden").write_text("not read")
    assert read(section("text", tmp_path)) == (TEXTS, {"no text": 1, "not utf-8": 1})
    assert read(section("text", tmp_path / "a.txt")) == (TEXTS[:1], {})
    assert read(section("text", tmp_path / "*.txt")) == ([TEXTS[0], TEXTS[3]], {"no text": 1, "not utf-8": 1})
    assert read(section("text", tmp_path / "**" / "*.md")) == ([TEXTS[1]], {})


def test_jsonl_folder_field_and_compression(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "1.jsonl", [{"body": TEXTS[0], "n": 1}, {"body": None, "n": 2}, {"body": "", "n": 3}])
    with gzip.open(tmp_path / "2.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps({"body": TEXTS[1], "n": 1}) + "\n")
    assert read(section("jsonl", tmp_path, text_field="body")) == (TEXTS[:2], {"no text": 2})
    assert read(section("jsonl", tmp_path / "2*", text_field="body")) == (TEXTS[1:2], {})


def test_a_list_is_searched_for_surrogates_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of the whole file for each row takes ten minutes for the 52,002 rows of Alpaca."""
    pattern, searches = file_rows._SURROGATE, list[bytes]()
    counted = SimpleNamespace(search=lambda raw: searches.append(raw) or pattern.search(raw))
    monkeypatch.setattr(file_rows, "_SURROGATE", counted)
    rows = [*({"text": f"row {number}"} for number in range(20)), {"text": "\ud83d"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    *found, (where, last) = file_rows.json_rows(str(tmp_path / "rows.json"))
    assert [row for _, row in found] == rows[:-1] and len(searches) == 1
    assert f"{where} {last}".endswith("item 21 holds a lone surrogate, which is no character")


def packed(path: Path, *parts: bytes) -> None:
    """A compressed file of several members or frames, as appending to one or joining files makes it."""
    compression = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}[path.suffix]
    with path.open("wb") as file:
        for part in parts:
            with pa.output_stream(made := pa.BufferOutputStream(), compression=compression) as stream:
                stream.write(part)
            file.write(made.getvalue())


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2"])
def test_what_is_compressed_reads_as_what_is_not(tmp_path: Path, suffix: str) -> None:
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in TEXTS]
    packed(tmp_path / f"a.jsonl{suffix}", b"".join(lines[:2]), lines[2])
    (tmp_path / "b.jsonl").write_bytes(lines[3])
    for path in (tmp_path / "*.jsonl*", tmp_path):
        assert read(section("jsonl", path)) == (TEXTS, {})
    (tmp_path / "b.jsonl").rename(tmp_path / "b.ndjson")
    (tmp_path / f"a.jsonl{suffix}").rename(tmp_path / f"a.json{suffix}")
    assert read(section("jsonl", tmp_path)) == (TEXTS, {})
    packed(tmp_path / f"a.txt{suffix}", TEXTS[0].encode()[:1], TEXTS[0].encode()[1:])
    packed(tmp_path / f"latin.txt{suffix}", "Käse".encode("latin-1"))
    assert read(section("text", tmp_path / "*.txt*")) == ([TEXTS[0]], {"not utf-8": 1})
    packed(tmp_path / f"all{suffix}", "|".join(TEXTS).encode())
    assert read(section("text", tmp_path / f"all{suffix}", document_separator="|")) == (TEXTS, {})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """200 rows in each form, by the end of the file's name."""
    rows = [{"text": f"text number {number} " * 20} for number in range(200)]
    file = tmp_path_factory.mktemp("whole") / "a.parquet"
    pq.write_table(pa.table({"text": [row["text"] for row in rows]}), file)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    packed = {"jsonl.gz": gzip.compress(lines), "jsonl.zst": pa.compress(lines, codec="zstd", asbytes=True)}
    packed["jsonl.bz2"] = bz2.compress(lines)
    texts = {f"txt.{end}": packed[f"jsonl.{end}"] for end in ("gz", "zst", "bz2")}
    return {"parquet": file.read_bytes(), "jsonl": lines, **packed, **texts}


DAMAGES: dict[str, Any] = {
    "cut": lambda whole: whole[: len(whole) // 2],
    "something else": lambda whole: b"no such format, \x00" * 40,
    "overwritten": lambda whole: whole[:400] + b"\xff" * 300 + whole[700:],
    "wrong checksum": lambda whole: whole[:-8] + bytes(8),
}
DAMAGED = [
    *(("parquet", how) for how in list(DAMAGES)[:3]),
    *((f"{kind}.{end}", how) for kind in ("jsonl", "txt") for end in ("gz", "zst", "bz2") for how in list(DAMAGES)[:3]),
    *((kind, "wrong checksum") for kind in ("parquet", "jsonl.gz", "txt.gz")),
    *(("jsonl", how) for how in list(DAMAGES)[:3]),
]


@pytest.mark.parametrize(("kind", "how"), DAMAGED)
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, capfd, whole, kind: str, how: str) -> None:
    """Among whole ones, without a line of the library that reads it. Of JSONL its line as well."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in (("a", whole[kind]), ("b", DAMAGES[how](whole[kind])), ("c", whole[kind])):
        (folder / f"{name}.{kind}").write_bytes(content)
    chosen = {"txt": "text"}.get(kind.partition(".")[0], kind.partition(".")[0])
    with pytest.raises(
        UserError, match=rf"^{folder}/b.{kind}(: cannot be read \(|:\d+: is not (JSON|UTF-8) \()"
    ) as caught:
        read(section(chosen, folder / "*"))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("content", [b"", gzip.compress(b"")], ids=["of no bytes", "packed"])
def test_a_file_without_rows_has_no_documents(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    assert read(section("jsonl", tmp_path / "a.jsonl.gz")) == ([], {})


def test_a_local_dataset_folder_of_the_hub_kind(tmp_path: Path) -> None:
    for config in ("english", "german"):
        (tmp_path / config).mkdir()
        for split in ("train", "test"):
            table = pa.table({"content": [f"{config} {split} {i}" for i in range(3)]})
            pq.write_table(table, tmp_path / config / f"{split}-00000-of-00001.parquet")
    configs = "".join(
        f"- config_name: {c}\n  data_files:\n"
        + "".join(f"  - split: {s}\n    path: {c}/{s}-*\n" for s in ("train", "test"))
        for c in ("english", "german")
    )
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    documents, _ = read(section("hub", tmp_path, name="german", split="test", text_field="content"))
    assert documents == [f"german test {i}" for i in range(3)]
    own = ValidationSection(str(tmp_path), source="hub", split="test", configuration="german")
    assert read(section_of(section("hub", tmp_path, text_field="content"), own))[0] == documents
    for chosen, missing in (({"name": "french"}, "french"), ({"name": "german", "split": "nosplit"}, "nosplit")):
        with pytest.raises(UserError, match=rf"data.path=.*cannot be read.*{missing}"):
            read(section("hub", tmp_path, **chosen, text_field="content"))


def test_a_folder_saved_by_datasets(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_dict({"text": TEXTS})
    saved.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path / "splits")
    assert read(section("hub", tmp_path / "plain"))[0] == TEXTS
    assert read(section("hub", tmp_path / "splits"))[0] == TEXTS
    assert "no split 'test', its splits are train" in refused(read, section("hub", tmp_path / "splits", split="test"))


def test_stdlib_is_sorted_deduplicated_and_without_site_packages(tmp_path, monkeypatch):
    for name in ["b.py", "a.py", "sub/a.py", "site-packages/x.py", "__pycache__/a.pyc", "notes.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {Path(name).name}\n")
    (tmp_path / "bad.py").write_bytes(b"# \xff\xfe\n")
    monkeypatch.setattr(data.sources.sources.sysconfig, "get_path", lambda name: str(tmp_path))
    assert read(section("stdlib", None)) == (["# a.py\n", "# b.py\n"], {"duplicate": 1, "not utf-8": 1})


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet", "hub"])
def test_a_missing_path(source: str, tmp_path: Path) -> None:
    assert f"data.path: missing; data.source={source}" in refused(open_source, section(source, None))
    if source != "hub":
        with pytest.raises(UserError, match=r"data.path=.*nowhere: no file there"):
            open_source(section(source, tmp_path / "nowhere"))
        with pytest.raises(UserError, match=r"data.path=.*: no file there"):
            open_source(section(source, tmp_path))


def test_a_missing_field_names_those_that_are_there(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"body": "x", "id": 1}])
    with pytest.raises(UserError, match=r"data.text_field=text: not a field of data.path=.*; its fields are body, id"):
        read(section("jsonl", path))
    with pytest.raises(UserError, match=rf"^{path}:1: id: is a number, not text; correct the row, or set"):
        read(section("jsonl", path, text_field="id"))
    later = write_jsonl(tmp_path / "b.jsonl", [{"body": "x"}] * 999 + [{"text": "y"}, {"body": "z"}])
    assert read(section("jsonl", later)) == (["y"], {"no text": 1000})
    write_jsonl(later, [{"body": "x"}] * 1000 + [{"text": "y"}])
    assert "data.text_field=text: not a field of" in refused(read, section("jsonl", later))


@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.bz2"])
@pytest.mark.parametrize(
    ("value", "problem"),
    [('["x"]', "text: is a list, not text; correct the row, or set"), ('"x\\ud83d"', "holds a lone surrogate")],
)
def test_a_row_without_text_is_named_by_file_and_line(tmp_path: Path, name: str, value: str, problem: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "fine"}] * 2)
    lines = "\n".join(
        ['{"text": "\\ud83d\\ude00"}', "", '{"text": "fine"}', f'{{"text": {value}}}', '{"text": "fine"}']
    )
    (tmp_path / name).write_bytes(bz2.compress(lines.encode()) if name.endswith(".bz2") else lines.encode())
    assert refused(read, section("jsonl", tmp_path)).startswith(f"{tmp_path}/{name}:4: {problem}")


def test_a_row_of_parquet_without_text_is_named_by_its_number(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [None, ["x"]]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a.parquet: row 2: text: is a list, not text; correct the row, or set"):
        read(section("parquet", tmp_path / "a.parquet"))


def test_a_table_of_text_is_refused_with_what_turns_it_into_rows(tmp_path: Path) -> None:
    (tmp_path / "my rows.csv").write_text("text,label\nhello,1\n")
    with pytest.raises(UserError, match=r"my rows.csv: is a text table, .* python -c \"(.*)\"$") as caught:
        open_source(section("hub", tmp_path / "my rows.csv"))
    program = str(caught.value).partition('python -c "')[2].removesuffix('"')
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert read(section("jsonl", tmp_path / "my rows.jsonl")) == (["hello"], {})


def test_an_unreachable_hub_is_told_in_one_line() -> None:
    program = (
        "from collections import Counter\nfrom config.schema import DataSection\n"
        "from data.sources.sources import open_source\n"
        "source = open_source(DataSection(source='hub', path='nobody/nothing'))\n"
        "try: list(source.documents(Counter()))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    command = ["env", "HF_HUB_OFFLINE=1", sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.startswith("Unreadable data.path=nobody/nothing: cannot be read (")
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize("hashed_bytes", [1 << 30, 0])
def test_identity_follows_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed_bytes: int) -> None:
    monkeypatch.setattr(data.sources.sources, "HASHED_BYTES", hashed_bytes)
    path = tmp_path / "a.txt"
    path.write_text("one")
    seen = [open_source(section("text", tmp_path)).identity]

    def look() -> str:
        seen.append(open_source(section("text", tmp_path)).identity)
        return seen[-1]

    assert look() == seen[0]
    os.utime(path, ns=(1, 1))
    # Touching a file changes its time, not its content.
    assert (look() == seen[0]) is bool(hashed_bytes)
    path.write_text("two")
    assert look() not in seen[:-1]
    path.rename(tmp_path / "b.txt")
    assert look() not in seen[:-1]


def test_identity_of_a_hub_dataset_needs_no_network() -> None:
    plain = section("hub", "o/n")
    names = [plain, section("hub", "o/n@abc"), replace(plain, name="x"), replace(plain, split="test")]
    assert len({open_source(name).identity for name in names}) == len(names)


def test_what_python_caches_beside_its_files_makes_no_other_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a = 1")
    before = open_source(section("text", tmp_path)).identity
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"\xff\xfe")
    assert open_source(section("text", tmp_path)).identity == before


def test_linked_folders_are_read_each_once(tmp_path: Path) -> None:
    store, mix = tmp_path / "store", tmp_path / "mix"
    for path in (store / "a" / "deep" / "1.txt", store / "b" / "2.txt", mix / "own" / "3.txt"):
        path.parent.mkdir(parents=True)
        path.write_text(path.stem)
    before = open_source(section("text", mix)).identity
    (mix / "latest").symlink_to("own")  # a part of the folder already
    (mix / "own" / "up").symlink_to("..")
    (mix / ".kept").symlink_to(store)
    assert open_source(section("text", mix)).identity == before
    for name, target in (("b", store / "b"), ("a", store / "a"), ("again", store / "b")):
        (mix / name).symlink_to(target)
    (mix / "lost").symlink_to("nowhere")
    for path in (mix, mix / "**" / "*.txt", mix / "**", tmp_path / "m*" / "**" / "?.txt"):
        found = [os.path.relpath(file, mix) for file in open_source(section("text", path)).files]
        assert found == ["a/deep/1.txt", "again/2.txt", "own/3.txt"]
    assert open_source(section("text", mix / "**" / "deep" / "*")).files == (f"{mix}/a/deep/1.txt",)
    (tmp_path / "run.yaml").write_text("{model: {architecture: llama}, data: {source: text}}")
    load_config(tmp_path / "run.yaml", [f"data.path={mix}/**/deep/*.txt"], None)
    assert open_source(section("text", mix / "*" / "*.txt")).files[0] == f"{mix}/again/2.txt"


@pytest.mark.parametrize("separator", [b"\n", b"\n\n", b"aba", b"aaab", "ß".encode(), b"abaabaaba"])
def test_pieces_are_those_of_split(separator: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    alphabet = sorted({separator[i : i + 1] for i in range(len(separator))} | {b"c", separator})
    for size in (1, 2, 3, 5, 64):
        monkeypatch.setattr(data.sources.files, "BLOCK_BYTES", size)
        for length in (0, 1, *range(30, 300, 10)):
            content = b"".join(draw.choices(alphabet, k=length))
            assert list(pieces(io.BytesIO(content), separator)) == content.split(separator)


def test_a_file_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.RawIOBase):
        """64 MiB that are made while they are read, a line end in every 4 MiB."""

        left = 64

        def read(self, size: int = -1) -> bytes:
            if not self.left:
                return b""
            self.left -= 1
            return b"x" * (size - 1) + (b"\n" if self.left % 4 == 0 else b"x")

    tracemalloc.start()
    count = sum(1 for piece in pieces(Endless(), b"\n"))  # type: ignore[arg-type]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 17
    assert most < 20 << 20
