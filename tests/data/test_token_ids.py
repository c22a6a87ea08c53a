"""Documents that are token ids already make the shards of the text that they are the ids of."""

import hashlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from config.errors import UserError
from config.schema import DataSection, SourceSection
from data.corpora.mix import mixed
from data.text.prepare import prepare
from data.text.tokenizer import load_tokenizer
from tests.data.test_prepare import tokens
from tests.support.rows import indexed_dataset
from tests.support.rows.jsonl import write_jsonl

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
