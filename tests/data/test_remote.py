"""Sources behind URLs: the shards of the same files on a disk, a name for what changes, and one line for what fails."""

import gzip
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.registry import known_implementations

from config.errors import UserError
from config.schema import DataSection
from data.sources.sources import open_source
from data.text import batch_results
from data.text import prepare as preparation
from data.text.prepare import prepare
from tests.data.test_prepare import tokens
from tests.support.servers import threads
from tests.support.servers.store_server import s3_server
from tests.support.servers.threads import answering


class Web(threads.Server):
    """The files of a folder, whole or in parts."""

    def __init__(self, folder: Path, *, parts: bool) -> None:
        super().__init__(partial(_Handler, directory=str(folder)))
        self.parts, self.ranges = parts, 0
        self.cut: tuple[str, ...] = ()  # ends of the names of files that break off


class _Handler(threads.Handler, SimpleHTTPRequestHandler):
    server: Web

    def do_GET(self) -> None:
        path, wanted = Path(self.translate_path(self.path)), self.headers.get("Range")
        if path.is_file() and path.name.endswith(self.server.cut):
            self.send_response(200)
            self.send_header("Content-Length", str(path.stat().st_size))
            self.end_headers()
            self.wfile.write(path.read_bytes()[:-5])
        elif path.is_file() and self.server.parts and wanted is not None:
            first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
            content = path.read_bytes()
            part = content[first : last + 1]
            self.server.ranges += 1
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part)
        else:
            super().do_GET()


@pytest.fixture
def web(corpus: Path) -> Iterator[Callable[..., Web]]:
    with ExitStack() as started:
        yield lambda *, parts: started.enter_context(answering(Web(corpus, parts=parts)))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """One corpus in every form, of several files, of which text and rows have different orders."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices(["alpha", "βήτα", "gamma\n"], k=draw.randint(1, 400))) for _ in range(30)]
    folder = tmp_path / "corpus"
    for kind in ("text", "jsonl", "parquet"):
        (folder / kind / "more").mkdir(parents=True)
    for name, part in (("a", texts[:10]), ("more", texts[10:20]), ("more/c", texts[20:])):
        (folder / f"text/{name}.txt").write_bytes("\n==\n".join(part).encode())
        rows = "".join(json.dumps({"text": text, "ids": list(text.encode())}) + "\n" for text in part).encode()
        if name == "more":
            (folder / "jsonl/more.jsonl.gz").write_bytes(gzip.compress(rows))
        else:
            (folder / f"jsonl/{name}.jsonl").write_bytes(rows)
        table = pa.table({"text": part, "ids": [list(text.encode()) for text in part]})
        pq.write_table(table, folder / f"parquet/{name}.parquet")
    (folder / "text/.hidden").write_text("not read")
    return folder


@pytest.fixture
def in_memory(corpus: Path) -> Iterator[str]:
    system = fsspec.filesystem("memory")
    system.put(str(corpus), "/stored", recursive=True)
    yield "memory://stored"
    system.rm("/stored", recursive=True)


def section(tmp_path: Path, kind: str, path: str, **more: Any) -> DataSection:
    given: dict[str, Any] = {"tokenizer": "bytes", "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.2}
    if kind == "text":
        given["document_separator"] = "\n==\n"
    return DataSection(source=kind, path=path, workers=1, **{**given, **more})  # type: ignore[arg-type]


def documents(tmp_path: Path, kind: str, path: str) -> list[str]:
    return list(open_source(section(tmp_path, kind, path)).documents(Counter()))


def assert_same_shards(tmp_path: Path, kind: str, disk: str, url: str, **more: Any) -> None:
    """The files at both are prepared to the same shards, in the same splits, each once."""
    first, second, again = (prepare(section(tmp_path, kind, path, **more), progress=False) for path in (disk, url, url))
    assert tokens(first) == tokens(second) and first.content == second.content
    assert first.train_documents == second.train_documents and all(tokens(first).values())
    assert first.folder != second.folder == again.folder


def test_folders_globs_and_files_are_those_of_a_disk(tmp_path: Path, corpus: Path, in_memory: str) -> None:
    for kind in ("text", "jsonl", "parquet"):
        for path in (kind, f"{kind}/", f"{kind}/[am]*", f"{kind}/**/?.*"):
            found = documents(tmp_path, kind, f"{in_memory}/{path}")
            assert found == documents(tmp_path, kind, f"{corpus}/{path}") and len(found) in (20, 30)
        assert_same_shards(tmp_path, kind, f"{corpus}/{kind}", f"{in_memory}/{kind}")
    text, rows = (documents(tmp_path, kind, f"{in_memory}/{kind}") for kind in ("text", "jsonl"))
    assert rows == [*text[:10], *text[20:], *text[10:20]]  # more.txt, more/c.txt; more/c.jsonl, more.jsonl
    for kind in ("jsonl", "parquet"):
        assert_same_shards(tmp_path, kind, f"{corpus}/{kind}", f"{in_memory}/{kind}", input_ids_field="ids")
    for place in (f"{corpus}/sparse.jsonl", f"{in_memory}/sparse.jsonl"):
        with fsspec.open(place, "wb") as file:
            file.write(b'{"text": "a", "n": 1}\n\n{"n": 2}\n{"text": null, "more": [1]}\n{"text": "b"}')
        skipped: Counter[str] = Counter()
        assert list(open_source(section(tmp_path, "jsonl", place)).documents(skipped)) == ["a", "b"]
        assert skipped == {"no text": 2}
    name = f"{corpus}/text/more/c.txt"
    assert documents(tmp_path, "text", f"file://{name}") == documents(tmp_path, "text", name)


def test_a_web_server_that_sends_files_whole_and_one_that_sends_parts(tmp_path, corpus, web) -> None:
    whole, parts = web(parts=False), web(parts=True)
    for server in (whole, parts):
        for kind, disk, url in (
            ("text", "text", "text/"),
            ("text", "text/*.txt", "text/*.txt"),
            ("text", "text/a.txt", "text/a.txt?download=true"),
            ("jsonl", "jsonl/more.jsonl.gz", "jsonl/more.jsonl.gz"),
        ):
            found = documents(tmp_path, kind, f"{server.url}/{url}")
            assert found == documents(tmp_path, kind, f"{corpus}/{disk}") and len(found) >= 10
    assert_same_shards(tmp_path, "text", f"{corpus}/text", f"{whole.url}/text/")
    (corpus / "large.txt").write_bytes(b"0123456789\n" * 600_000)  # more than fsspec asks for at a time
    assert documents(tmp_path, "text", f"{whole.url}/large.txt") == [(corpus / "large.txt").read_text(encoding="utf-8")]
    parts.ranges = 0
    assert_same_shards(tmp_path, "parquet", f"{corpus}/parquet", f"{parts.url}/parquet/", input_ids_field="ids")
    assert parts.ranges
    noise = [list(random.Random(0).randbytes(6 << 20))]
    table = pa.table({"ids": pa.array(noise, pa.list_(pa.uint8()))})
    pq.write_table(table, corpus / "large.parquet", use_dictionary=[])
    with pytest.raises(UserError, match=r"large.parquet: cannot be read \(.*range requests"):
        prepare(section(tmp_path, "parquet", f"{whole.url}/large.parquet", input_ids_field="ids"), progress=False)


def test_what_was_prepared_is_named_by_place_size_and_version(tmp_path, corpus, in_memory, web) -> None:
    server = web(parts=False)
    for time, url in enumerate((f"{in_memory}/text", f"{server.url}/text/a.txt", f"{server.url}/text/*.txt"), 10**9):
        data = section(tmp_path, "text", url)
        before = open_source(data).identity
        assert open_source(data).identity == before
        content = (corpus / "text/a.txt").read_bytes()
        (corpus / "text/a.txt").write_bytes(content[::-1])  # of the same size
        os.utime(corpus / "text/a.txt", (time, time))
        fsspec.filesystem("memory").pipe_file("/stored/text/a.txt", content[::-1])
        assert open_source(data).identity != before
        assert open_source(replace(data, document_separator="x")).identity != open_source(data).identity


def test_what_was_tokenized_before_a_connection_broke_is_not_tokenized_again(tmp_path, corpus, web, monkeypatch):
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 500)
    server, disk = web(parts=False), section(tmp_path, "text", f"{corpus}/text/*.txt", tokenizer="bpe:300")
    alone = prepare(disk, progress=False)
    over = section(tmp_path, "text", f"{server.url}/text/*.txt", tokenizer=str(alone.tokenizer_folder))
    server.cut = ("more.txt",)
    with pytest.raises(UserError, match=r"text/more.txt: cannot be read \("):
        prepare(over, progress=False)
    kept, computed = list((tmp_path / "cache").glob("*.pieces/??/*")), list[Any]()
    submit = batch_results.Workers.submit
    monkeypatch.setattr(batch_results.Workers, "submit", lambda pool, item: computed.append(item) or submit(pool, item))
    server.cut = ()
    assert tokens(prepare(over, progress=False)) == tokens(alone)
    total = len(list(preparation._batches(open_source(over).documents(Counter()))))
    assert 3 <= len(kept) == total - len(computed)


def test_a_store_without_files_answers_or_packages_is_one_line(tmp_path, in_memory, web, monkeypatch) -> None:
    server = web(parts=False)
    monkeypatch.setitem(known_implementations, "shelf", {"class": "shelffs.Shelf", "err": "Get shelffs"})
    for package in ("gcsfs", "adlfs"):
        monkeypatch.setitem(sys.modules, package, None)
    for path, problem in (
        (f"{in_memory}/nothing", "no file there. Set data.path to a file, a folder with"),
        (f"{in_memory}/text/*.jsonl", "no file there. Set data.path to a file, a folder with"),
        (f"{server.url}/nothing", "no file there. Set data.path to a file, a folder with"),
        ("http://127.0.0.1:1/a.txt", "cannot be read .*Check the URL, the credentials and the network"),
        ("nowhere://a", "cannot be read .Protocol not known: nowhere"),
        ("shelf://a", r"Get shelffs. Install it \(pip install shelffs\), or copy the files to a disk"),
        ("gs://b/a.txt", r"install gcsfs to access Google Storage. Install it \(pip install gcsfs\), or copy the fil"),
        ("abfs://c@a/a.txt", r"Install adlfs .*Azure Blob Storage. Install it \(pip install adlfs\), or copy the fil"),
    ):
        with pytest.raises(UserError, match=f"^data.path={path.replace('*', '[*]')}: .*{problem}") as caught:
            open_source(section(tmp_path, "text", path))
        assert "\n" not in str(caught.value)
    server.cut = (".txt", ".jsonl", ".gz")
    for kind, name in (("text", "a.txt"), ("jsonl", "a.jsonl"), ("jsonl", "more.jsonl.gz")):
        with pytest.raises(UserError, match=rf"{server.url}/{kind}/{name}: cannot be read \(") as caught:
            documents(tmp_path, kind, f"{server.url}/{kind}/{name}")
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_an_s3_server(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.direct.meta.endpoint_url)
        server.direct.create_bucket(Bucket="bucket")
        for path in filter(Path.is_file, corpus.rglob("*")):
            server.direct.upload_file(str(path), "bucket", f"in/{path.relative_to(corpus)}")
        for kind in ("text", "jsonl", "parquet"):
            for path in (kind, f"{kind}/[am]*", f"{kind}/**/?.*"):
                found = documents(tmp_path, kind, f"s3://bucket/in/{path}")
                assert found == documents(tmp_path, kind, f"{corpus}/{path}") and len(found) in (20, 30)
            assert_same_shards(tmp_path, kind, f"{corpus}/{kind}", f"s3://bucket/in/{kind}")
        more = {"input_ids_field": "ids"}
        assert_same_shards(tmp_path, "parquet", f"{corpus}/parquet", "s3://bucket/in/parquet", **more)
        before = open_source(section(tmp_path, "text", "s3://bucket/in/text")).identity
        content = (corpus / "text/a.txt").read_bytes()
        server.direct.put_object(Bucket="bucket", Key="in/text/a.txt", Body=content[::-1])
        assert open_source(section(tmp_path, "text", "s3://bucket/in/text")).identity != before
        for path, problem in (
            ("s3://bucket/none", "no file there"),
            ("s3://none/a", "cannot be read .*NoSuchBucket.*Check the URL, the credentials and the network"),
        ):
            with pytest.raises(UserError, match=f"^data.path={path}: {problem}"):
                open_source(section(tmp_path, "text", path))
