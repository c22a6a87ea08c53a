"""Tokenizers: exact round trips, document ends that text cannot forge, refusals; documents that are token ids."""

import hashlib
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import data.text.encode
import data.text.tokenizer
from config.errors import UserError
from config.schema import DataSection, SourceSection
from data.corpora.mix import mixed
from data.rows.prepare_labelled import prepare_labelled
from data.rows.prepare_prompts import prepare_prompts
from data.rows.prepare_rows import prepare_rows
from data.sources.row_sources import is_held_out
from data.sources.sources import Source, open_source
from data.text.encode import END_OF_DOCUMENT, DocumentEncoder, byte_ids, is_validation, pieces, train_bpe
from data.text.prepare import prepare
from data.text.tokenizer import draw_sample, load_tokenizer, make_tokenizer, tokenizer_identity, vocabulary_size
from tests.data.test_prepare import tokens
from tests.support.rows import indexed_dataset
from tests.support.rows.chats import unigram
from tests.support.rows.jsonl import write_jsonl

EXAMPLES = ["", " ", "def f(x):\n    return x\r\n", "ünï\x00cödé 🙂 \u2028 e\u0301"]
EXAMPLES += [f"a{END_OF_DOCUMENT}b {END_OF_DOCUMENT}"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("text")
    for path in sorted(Path(data.text.encode.__file__).parent.glob("*.py")):
        (folder / path.name).write_bytes(path.read_bytes())
    return open_source(DataSection(source="text", path=str(folder)))


@pytest.fixture(scope="module", params=["bytes", "bpe:500"])
def tokenizer(request: pytest.FixtureRequest, source: Source, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(request.param, source, 0.0).save_pretrained(folder)
    return load_tokenizer(folder)


@settings(deadline=None)
@given(text=st.text() | st.sampled_from(EXAMPLES))
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < vocabulary_size(tokenizer) and tokenizer.eos_token_id not in ids


def test_the_vocabulary_is_what_was_asked(source: Source) -> None:
    assert vocabulary_size(make_tokenizer("bytes", source, 0.0)) == 257
    assert vocabulary_size(make_tokenizer("bpe:400", source, 0.0)) == 400


def test_training_a_bpe_twice_gives_the_same(source: Source) -> None:
    sample = draw_sample(source, 0.0)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        first, second = (pool.submit(train_bpe, 600, sample).result() for _ in range(2))
    assert first == second
    assert len(json.loads(first)["model"]["vocab"]) == 600


def test_the_sample_is_bounded_deterministic_and_without_validation_documents(source, monkeypatch):
    whole = draw_sample(source, 0.0)
    sizes = [len(text.encode()) for text in whole]
    limit = sum(sizes) // 2
    monkeypatch.setattr(data.text.tokenizer, "SAMPLE_BYTES", limit)
    part = draw_sample(source, 0.0)
    assert part == whole[: len(part)] == draw_sample(source, 0.0)
    assert 0 < sum(sizes[: len(part)]) <= limit
    monkeypatch.undo()
    kept = draw_sample(source, 0.5)
    assert kept == [text for text in whole if not is_validation(text, 0.5)]
    assert 0 < len(kept) < len(whole)
    monkeypatch.setattr(data.text.tokenizer, "SCANNED_BYTES", 1)
    assert len(draw_sample(source, 0.0)) == 1


@pytest.mark.parametrize(
    ("prepare", "form"), [(prepare_rows, "auto"), (prepare_prompts, "auto"), (prepare_labelled, "labelled")]
)
def test_the_sample_of_rows_is_of_all_that_are_trained_and_of_no_other(tmp_path, monkeypatch, prepare, form) -> None:
    drawn: list[str] = []

    def draw(source: Source, fraction: float) -> list[str]:
        drawn.extend(draw_sample(source, fraction))
        raise UserError("drawn")

    monkeypatch.setattr(data.text.tokenizer, "draw_sample", draw)
    rows = [{"prompt": f"<{number}>", "completion": "a", "text": f"<{number}>", "label": 1} for number in range(200)]
    path, cache = write_jsonl(tmp_path / "rows.jsonl", rows), str(tmp_path / "cache")
    given = {"tokenizer": "bpe:300", "validation_fraction": 0.5, "cache_dir": cache, "format": form}
    with pytest.raises(UserError, match="drawn"):
        prepare(DataSection(source="jsonl", path=str(path), **given), progress=False)
    kept = {number for number, row in enumerate(rows) if not is_held_out(row, 0.5)}
    assert set(map(int, re.findall(r"<(\d+)>", " ".join(drawn)))) == kept and 60 < len(kept) < 140


def test_the_sample_is_the_documents_of_the_smallest_hashes_in_any_order_of_arrival(tmp_path, monkeypatch):
    """A large document that is evicted must not make room for a later one with a larger hash."""
    generator = random.Random(3)
    for case in range(30):
        folder = tmp_path / str(case)
        folder.mkdir()
        for index in range(12):
            (folder / f"{index:02d}.txt").write_text(f"{index}-{case} " + "x" * generator.choice([3, 30, 300]))
        texts = open_source(DataSection(source="text", path=str(folder)))
        whole = draw_sample(texts, 0.0)
        monkeypatch.setattr(data.text.tokenizer, "SAMPLE_BYTES", sum(len(text) for text in whole) // 2)
        part = draw_sample(texts, 0.0)
        assert part == whole[: len(part)]
        monkeypatch.undo()


def word_level(folder: Path, **special: str) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<end>": 1, "hello": 2, "world": 70000}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def test_a_local_folder_and_a_vocabulary_with_gaps(tmp_path: Path, source: Source) -> None:
    folder = word_level(tmp_path, eos_token="<end>")
    tokenizer = make_tokenizer(str(folder), source, 0.0)
    assert tokenizer.eos_token_id == 1
    assert vocabulary_size(tokenizer) == 70001


def test_a_tokenizer_cuts_text_as_its_file_does_whatever_its_class(tmp_path: Path, source: Source) -> None:
    """transformers' GPT2Tokenizer joins the digits that the file's rule cuts."""
    filed = Tokenizer(models.BPE())
    digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    filed.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet)
    filed.train_from_iterator(["their 1 words x"] * 9, trainer=trainer)
    document = json.loads(filed.to_str())
    document["model"]["vocab"]["12"] = len(document["model"]["vocab"])
    document["model"]["merges"].append(["1", "2"])
    Tokenizer.from_str(json.dumps(document)).save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "unk_token": "</s>", "bos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = make_tokenizer(str(tmp_path), source, 0.0)
    loaded.save_pretrained(tmp_path / "saved")
    for tokenizer in (loaded, load_tokenizer(tmp_path / "saved")):
        assert tokenizer.tokenize("x12") == ["x", "1", "2"] and tokenizer.eos_token == "</s>"


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path: Path, source: Source) -> None:
    with pytest.raises(UserError, match=r"data.tokenizer=.*has no end-of-document token"):
        make_tokenizer(str(word_level(tmp_path)), source, 0.0)


def test_what_is_no_tokenizer_is_told_in_one_line(tmp_path: Path, source: Source) -> None:
    (tmp_path / "empty").mkdir()
    broken = word_level(tmp_path / "broken", eos_token="<end>")
    (broken / "tokenizer.json").write_text('{"model": 5}')
    for folder in (tmp_path / "empty", broken):
        with pytest.raises(UserError, match=r"data.tokenizer=.*cannot be loaded") as caught:
            make_tokenizer(str(folder), source, 0.0)
        assert "\n" not in str(caught.value)


def test_identity_follows_a_folders_contents(tmp_path: Path) -> None:
    folder = word_level(tmp_path / "a", eos_token="<end>")
    identity = tokenizer_identity(str(folder))
    assert identity == tokenizer_identity(str(word_level(tmp_path / "b", eos_token="<end>")))
    for name in ("vocab.txt", "spiece.model"):
        (folder / name).write_text("")
        assert identity == tokenizer_identity(str(folder)), "what tokenizer.json replaces"
    (folder / "tokenizer.json").unlink()
    seen = {identity, tokenizer_identity(str(folder))}
    for name in ("vocab.txt", "spiece.model", "tokenizer_config.json"):
        (folder / name).write_text("{}")
        seen.add(tokenizer_identity(str(folder)))
    assert len(seen) == 5
    PreTrainedTokenizerFast(tokenizer_object=unigram(["<unk>"])).save_pretrained(folder)
    assert tokenizer_identity(str(folder)).endswith(":text") and not identity.endswith(":text")


def test_documents_begin_with_the_tokenizers_first_token_if_asked(tmp_path: Path) -> None:
    folder = word_level(tmp_path / "tokenizer", eos_token="<end>")
    tokenizer = load_tokenizer(folder)
    first = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 1)])
    tokenizer.backend_tokenizer.post_processor = first
    tokenizer.save_pretrained(folder)
    path = write_jsonl(tmp_path / "texts.jsonl", [{"text": "hello"}, {"text": "world world"}])
    given = {"tokenizer": str(folder), "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.0}
    section = DataSection(source="jsonl", path=str(path), **given)  # type: ignore[arg-type]
    plain, begun = (prepare(replace(section, begin_of_document=how), progress=False) for how in ("none", "auto"))  # type: ignore[arg-type]
    assert [shard.array.tolist() for shard in plain.train.shards] == [[2, 1, 70000, 70000, 1]]
    assert [shard.array.tolist() for shard in begun.train.shards] == [[1, 2, 1, 1, 70000, 70000, 1]]
    assert "begin without <end>, which the tokenizer puts before a text" in plain.notes[0] and not begun.notes


@given(text=st.text(alphabet=st.sampled_from("ab\n"), max_size=60), limit=st.integers(1, 12))
def test_pieces_join_to_the_text_and_are_bounded(text: str, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.text.encode, "PIECE_CHARACTERS", limit)
        cut = list(pieces(text))
    assert "".join(cut) == text
    assert all(len(piece) <= limit for piece in cut)
    assert all(piece.endswith("\n") for piece in cut[:-1] if "\n" in piece)


def test_the_table_of_bytes_gives_what_its_tokenizer_gives(source: Source) -> None:
    tokenizer = make_tokenizer("bytes", source, 0.0).backend_tokenizer
    tokenizer.encode_special_tokens = True
    everything = "".join(map(chr, [*range(0x800), 0x20AC, 0xFFFF, 0x1F642, 0x10FFFF])) + END_OF_DOCUMENT
    # Valid UTF-8 has every byte but 0xC0, 0xC1 and 0xF5 to 0xFF; the table is whole all the same.
    wanted = tokenizer.encode(everything, add_special_tokens=False).ids
    assert byte_ids()[list(everything.encode())].tolist() == wanted
    assert sorted(byte_ids().tolist()) == list(range(256))
    assert [tokenizer.decode([token]) for token in byte_ids()[:0x80].tolist()] == [chr(code) for code in range(0x80)]


@pytest.mark.parametrize("kind", ["table", "bytes", "unigram"])
def test_documents_end_with_the_end_of_document_and_nothing_else_does(source, kind, monkeypatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # as the encoder sets it
    tokenizer, texts, bytewise = (
        make_tokenizer("bytes", source, 0.0),
        [text for text in EXAMPLES if text],
        kind == "table",
    )
    if kind == "unigram":
        made = unigram(["<unk>", END_OF_DOCUMENT])
        made.add_special_tokens(["<later>"])  # which is no piece
        tokenizer, texts = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END_OF_DOCUMENT), EXAMPLES[-1:]
        texts += [f"<unk> <later> {document}" for document in texts]
    found = DocumentEncoder(tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, "uint16", 0.5, bytewise)(
        texts
    )
    for split, ids in enumerate((found["train"], found["validation"])):
        wanted = [text for text in texts if is_validation(text, 0.5) is bool(split)]
        assert found["counts"][split].tolist() == [len(wanted), sum(len(text.encode()) for text in wanted)]
        ends = [i for i, token in enumerate(ids) if token == tokenizer.eos_token_id]
        starts = [0, *[end + 1 for end in ends]]
        assert [tokenizer.decode(ids[a:b]) for a, b in zip(starts, ends, strict=False)] == wanted
        assert starts[-1] == len(ids)


def test_the_validation_share_is_near_the_fraction() -> None:
    held_out = sum(is_validation(f"document {i}", 0.1) for i in range(10_000))
    # Binomial: mean 1000, standard deviation 30. A hash, so always the same number.
    assert abs(held_out - 1000) < 120
    assert not any(is_validation(f"document {i}", 0.0) for i in range(1000))


def test_workers_start_light() -> None:
    program = (
        "import data.text.encode, sys; print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


WORDS = ["alpha", "beta", "γάμμα", "delta\n", "<|endoftext|>"]


@pytest.fixture
def section(tmp_path: Path) -> DataSection:
    (tmp_path / "texts").mkdir()
    draw = random.Random(0)
    for number in range(60):
        text = " ".join(draw.choices(WORDS, k=draw.randint(1, 80)))
        (tmp_path / "texts" / f"{number:03d}").write_text(text, encoding="utf-8")
    given: dict[str, Any] = {"source": "text", "path": str(tmp_path / "texts"), "cache_dir": str(tmp_path / "cache")}
    return DataSection(**given, tokenizer="bpe:300", validation_fraction=0.0, workers=1)


def forms(folder: Path, documents: list[list[int]], end: int) -> dict[str, DataSection]:
    """The same documents as every source has them; every second one with its end, and empty ones between them."""
    ended = [ids + [end] * (number % 2) for number, ids in enumerate(documents)]
    ended = [*ended[:7], [], [end], *ended[7:]]
    rows = [{"n": number, "ids": ids} for number, ids in enumerate(ended)]
    write_jsonl(folder / "ids.jsonl", [*rows, {"n": -1, "ids": None}])
    (folder / "parquet").mkdir()
    for name, kind, part in (
        ("0", pa.list_(pa.int32()), ended[:20]),
        ("1", pa.large_list(pa.uint16()), [*ended[20:40], None]),
        ("2", pa.list_(pa.int64()), ended[40:]),
    ):
        pq.write_table(
            pa.table({"ids": pa.array(part, type=kind)}), folder / "parquet" / f"{name}.parquet", row_group_size=7
        )
    datasets.Dataset.from_dict({"ids": [*ended, None]}).save_to_disk(folder / "saved")
    indexed_dataset.write(folder / "megatron", [[ids] for ids in [*ended, []]], 4)
    named = {"jsonl": "ids.jsonl", "parquet": "parquet", "hub": "saved"}
    found = {
        kind: DataSection(source=kind, path=str(folder / path), input_ids_field="ids") for kind, path in named.items()
    }  # type: ignore[arg-type]
    return {**found, "megatron": DataSection(source="megatron", path=str(folder / "megatron"))}


@pytest.mark.parametrize("for_encoder", [False, True])
def test_every_form_makes_the_shards_of_the_text(section: DataSection, tmp_path: Path, for_encoder: bool) -> None:
    text = prepare(section, progress=False, for_encoder=for_encoder)
    tokenizer = load_tokenizer(text.tokenizer_folder)
    texts = [path.read_text(encoding="utf-8") for path in sorted((tmp_path / "texts").iterdir())]
    documents = [tokenizer(each, add_special_tokens=False).input_ids for each in texts]
    given = {"tokenizer": str(text.tokenizer_folder), "cache_dir": section.cache_dir}
    fraction = 0.2

    def held_out(ids: list[int]) -> bool:
        raw = b"".join(token.to_bytes(4, "little") for token in ids)
        digest = hashlib.blake2b(raw, digest_size=8, person=b"split").digest()
        return int.from_bytes(digest, "little") < fraction * 2**64

    def expected(validation: bool) -> bytes:
        kept = [[*ids, text.end_of_document] for ids in documents if held_out(ids) is validation]
        return b"".join(token.to_bytes(2, "little") for ids in kept for token in ids)

    fingerprints = {text.fingerprint}
    for source in forms(tmp_path, documents, text.end_of_document).values():
        corpus = prepare(replace(source, validation_fraction=0.0, **given), progress=False, for_encoder=for_encoder)
        assert tokens(corpus) == tokens(text)
        assert (corpus.train_documents, corpus.skipped) == (60, {"no tokens": 3})
        corpus = prepare(
            replace(source, validation_fraction=fraction, **given), progress=False, for_encoder=for_encoder
        )
        assert tokens(corpus) == {"train": expected(False), "validation": expected(True)}
        assert 0 < corpus.validation_documents == 60 - corpus.train_documents
        fingerprints.add(corpus.fingerprint)
    assert len(fingerprints) == 5


def test_a_large_vocabulary_another_field_and_lists_of_one_length(tmp_path: Path) -> None:
    """Ids above 65,535 are kept in 32 bits."""
    words = Tokenizer(models.WordLevel({"<eos>": 0, "last": 70_000}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(tmp_path / "tokenizer")
    rows = [{"ids": [1, 69_999, 3], "other": [70_000]}, {"ids": [5, 6, 0], "other": [1]}]
    given = {"cache_dir": str(tmp_path), "validation_fraction": 0.0, "tokenizer": str(tmp_path / "tokenizer")}
    data = DataSection(source="jsonl", path=str(write_jsonl(tmp_path / "a.jsonl", rows)), **given)  # type: ignore[arg-type]
    column = pa.array([row["ids"] for row in rows], type=pa.list_(pa.int32(), 3))
    pq.write_table(pa.table({"ids": column}), tmp_path / "a.parquet")
    fixed = replace(data, source="parquet", path=str(tmp_path / "a.parquet"))
    for section, field, expected in (
        (data, "ids", [1, 69_999, 3, 0, 5, 6, 0]),
        (data, "other", [70_000, 0, 1, 0]),
        (fixed, "ids", [1, 69_999, 3, 0, 5, 6, 0]),
    ):
        corpus = prepare(replace(section, input_ids_field=field), progress=False)
        assert np.frombuffer(tokens(corpus)["train"], "<u4").tolist() == expected


ROWS = [
    ({"ids": [1, 257, 2]}, r"{where}: ids\[1\]: is 257, and the ids of data.tokenizer=bytes are 0 to 256"),
    ({"ids": [1, 2, -1]}, r"{where}: ids\[2\]: is -1, and the ids of"),
    ({"ids": [1.5]}, "{where}: ids: is not a list of whole numbers"),
    ({"ids": ["1"]}, "{where}: ids: is not a list of whole numbers"),
    ({"ids": [[1], [2, 3]]}, "{where}: ids: is not a list of whole numbers"),
]
JSON_ROWS = [
    ({"ids": "text"}, "{where}: ids: is not a list of whole numbers"),
    ({"ids": 3}, "{where}: ids: is not a list of whole numbers"),
    ({"ids": [True]}, "{where}: ids: is not a list of whole numbers"),
    ({"id": [1], "n": 1}, "data.input_ids_field=ids: not a field of {where}; its fields are id, n"),
    ([1, 2], "{where}: is .1, 2., not an object with fields; correct the row"),
]


@pytest.mark.parametrize(("row", "problem"), [*ROWS, *JSON_ROWS])
def test_what_does_not_fit_is_named_by_file_row_and_id(tmp_path: Path, row: Any, problem: str) -> None:
    data = DataSection(tokenizer="bytes", cache_dir=str(tmp_path), input_ids_field="ids")
    path = str(write_jsonl(tmp_path / "a.jsonl", [{"ids": [0, 256]}, row]))
    cases = [(replace(data, source="jsonl", path=path), f"{path}:2")]
    if (row, problem) in ROWS:
        for name, part in (("a", [0, 256]), ("b", row["ids"])):
            pq.write_table(pa.table({"ids": [part]}), tmp_path / f"{name}.parquet")
        cases.append((replace(data, source="parquet", path=str(tmp_path)), f"{tmp_path}/b.parquet: row 1"))
    for section, where in cases:
        with pytest.raises(UserError, match=problem.replace("{where}", where)) as caught:
            prepare(section, progress=False)
        assert "\n" not in str(caught.value)


def test_a_parquet_file_without_lists_and_one_that_is_none(tmp_path: Path) -> None:
    data = DataSection(source="parquet", path=str(tmp_path), tokenizer="bytes", cache_dir=str(tmp_path / "cache"))
    data, path = replace(data, input_ids_field="ids"), tmp_path / "a.parquet"
    for table, problem in (
        ({"ids": [1]}, "a.parquet: ids: holds int64, not lists"),
        ({"id": [1]}, r"data.input_ids_field=ids: not a field of .*a.parquet; its fields are id\."),
    ):
        pq.write_table(pa.table(table), path)
        with pytest.raises(UserError, match=problem):
            prepare(data, progress=False)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"a.parquet: cannot be read \(.*\). Check that it is whole"):
        prepare(data, progress=False)


def test_ids_that_name_what_megatron_has_not(tmp_path: Path) -> None:
    indexed_dataset.write(tmp_path / "a", [[[0]], [[1, 300]]])
    data = DataSection(source="megatron", path=str(tmp_path / "a"), tokenizer="bytes", cache_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"a.idx: document 2: input_ids\[1\]: is 300, and the ids of data.tokenizer=by"):
        prepare(data, progress=False)


def test_nothing_but_empty_documents(tmp_path: Path) -> None:
    indexed_dataset.write(tmp_path / "a", [[], [[]], [[256]]])
    data = DataSection(source="megatron", path=str(tmp_path / "a"), tokenizer="bytes", cache_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"holds no document with tokens \(left out: 3 no tokens\)"):
        prepare(data, progress=False)


def test_tokenized_and_other_sources_are_mixed(section: DataSection, tmp_path: Path) -> None:
    indexed_dataset.write(tmp_path / "a", [[[number % 256 for number in range(3000)]]])
    path = str(write_jsonl(tmp_path / "a.jsonl", [{"ids": [7] * 2000}]))
    sources = tuple(
        SourceSection(source=kind, path=path, name=kind, weight=1.0)  # type: ignore[arg-type]
        for kind, path in (("megatron", str(tmp_path / "a")), ("jsonl", path), ("text", section.path))
    )
    data = replace(section, source="stdlib", path=None, sources=sources, tokenizer="bytes", input_ids_field="ids")
    corpus = mixed(replace(data, sequence_length=64), lambda item: prepare(item, progress=False))
    assert corpus.mixture is not None
    assert corpus.mixture.samples[:2] == (3000 // 64, 2000 // 64)
