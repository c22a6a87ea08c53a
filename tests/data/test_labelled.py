"""Rows with labels as they are prepared; every malformed file or config is one line and exit code 2."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from data.batches.loader import IGNORED_LABEL
from data.corpora.labelled_shards import LabelledShards
from tests.support.rows.chats import unigram
from tests.support.rows.labelled import tokenizer, write_rows
from tests.support.runs.showing import Show, error_of, shower


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def show(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Show:
    """`data.show` on a config for rows.jsonl in the test's folder."""
    text = f"task: classify\nmodel: {{architecture: bert}}\ndata: {{source: auto, path: {tmp_path}/rows.jsonl, "
    text += f"tokenizer: {made}, sequence_length: 40, cache_dir: {tmp_path}/cache, validation_fraction: 0}}\n"
    return shower(tmp_path / "run.yaml", text, capsys)


def test_it_prints_rows_with_their_labels(show: Show, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", "sequence", 30, pair=True)
    out = show("data.text_pair_field=other", "--rows", "2")
    first = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert f"[SEP] [{first['label']}]" in out
    assert "--- 2: " in out
    assert "30 rows of format labelled to train on, 0 rows held out; the longest row has" in out
    assert "3 labels, in training: " in out
    write_rows(tmp_path / "rows.jsonl", "token", 30)
    first = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    said = show("classify.kind=token", "--rows", "1").splitlines()[1]
    assert said.count(" [") - 1 == len(first["tags"])  # and [SEP]
    write_rows(tmp_path / "rows.jsonl", "regression", 30)
    out = show("classify.kind=regression", "--rows", "1")
    assert f"[{json.loads((tmp_path / 'rows.jsonl').read_text().splitlines()[0])['label']:g}]" in out
    assert "data: label is 299.9 on average, with a standard deviation of 4.6" in out


def test_it_prints_each_word_whole_before_its_label(show: Show, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(row(tokens=["lossing", "a", "weights"], tags=["x", "y", "x"]))
    assert show("classify.kind=token").splitlines()[1] == "[CLS] lossing [x] a [y] weights [x] [SEP]"


def test_it_prints_rows_of_several_sources(show: Show, tmp_path: Path) -> None:
    """Each source may have a single label."""
    for name in ("x", "y"):
        (tmp_path / f"{name}.jsonl").write_text(row(text=f"a row of {name}", label=name) + "\n")
    sources = f"data.sources=[{{path: {tmp_path}/x.jsonl}}, {{path: {tmp_path}/y.jsonl}}]"
    (tmp_path / "rows.jsonl").write_text(GOOD)
    out = show("data.path=null", sources, "--rows", "2")
    assert "[SEP] [x]" in out and "[SEP] [y]" in out and "data: source 2: 50.0% of the samples" in out


def prepared(made: Path, folder: Path, rows: list[dict[str, Any]], *overrides: str) -> Any:
    """The corpus of some rows."""
    from config.load import load_config
    from config.task import settle_task
    from data.rows.prepare_labelled import prepare_labelled

    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = [f"data.path={folder}/rows.jsonl", f"data.tokenizer={made}", f"data.cache_dir={folder}/cache"]
    given += ["task=classify", "model.architecture=bert", "data.source=jsonl", "data.sequence_length=12"]
    (folder / "empty.yaml").write_text("run: {name: test}\n")
    config = settle_task(load_config(folder / "empty.yaml", [*given, "data.validation_fraction=0", *overrides], None))
    return prepare_labelled(config.data, progress=False)


def test_labels_are_numbered_and_sorted(made: Path, tmp_path: Path) -> None:
    from config.schema import DataSection
    from data.corpora.corpus import labels_of

    corpus = prepared(made, tmp_path, [{"text": "a", "label": label} for label in (10, 9, 10, -1)])
    assert corpus.labels == ("10", "9", "-1")
    data = DataSection()
    assert labels_of(corpus, (), data) == ("-1", "9", "10")
    assert labels_of(corpus, ("10", "-1", "9", "7"), data) == ("10", "-1", "9", "7")
    mixed = prepared(made, tmp_path, [{"text": "a", "label": label} for label in (True, "no", False)])
    assert labels_of(mixed, (), data) == ("false", "no", "true")


def test_a_word_is_labelled_at_its_first_token_and_a_long_row_is_cut(made: Path, tmp_path: Path) -> None:
    words = ["Lossing", "a", "weights", "mask", "halfing", "gradients"]
    row = {"tokens": words, "tags": ["A", "B", "C", "B", "D", "E"]}
    short = {"tokens": words[:2], "tags": ["A", "B"]}
    options = ("classify.kind=token", "data.too_long=truncate_right", "data.sequence_length=9")
    corpus = prepared(made, tmp_path, [row, short], *options)
    assert isinstance(corpus.train, LabelledShards)
    found = corpus.train.labelled(0)
    pieces = tokenizer().convert_ids_to_tokens(found.tokens)
    assert pieces == ["[CLS]", "loss", "##ing", "a", "weight", "##s", "mask", "half", "[SEP]"]
    said = [corpus.labels[target] if target != IGNORED_LABEL else "" for target in found.target]
    assert said == ["", "A", "", "B", "C", "", "B", "D", ""]
    assert corpus.counts["truncated"] == 1
    assert corpus.train.labels(np.arange(2)).tolist() == [5, 2]
    assert corpus.train.places(np.arange(2)).tolist() == [9, 5]
    assert prepared(made, tmp_path, [row, short], *options[::2]).counts["dropped"] == 1


@pytest.mark.parametrize("kind", ["word pieces", "unigram"])
def test_a_text_that_spells_a_control_token_stays_text(made: Path, tmp_path: Path, kind: str) -> None:
    own: PreTrainedTokenizerFast = tokenizer()
    if kind == "unigram":
        model, given = unigram(["[PAD]", "<unk>", "[CLS]", "[SEP]"]), own.special_tokens_map
        model.post_processor = own.backend_tokenizer.post_processor
        own = PreTrainedTokenizerFast(tokenizer_object=model, **given | {"unk_token": "<unk>"})
    own.save_pretrained(tmp_path / "tokenizer")
    corpus = prepared(tmp_path / "tokenizer", tmp_path, [{"text": "a [SEP]", "label": 0}, {"text": "a", "label": 1}])
    assert (corpus.train.labelled(0).tokens == own.sep_token_id).sum() == 1


def row(**fields: Any) -> str:
    return json.dumps(fields)


GOOD = row(text="a", label="x") + "\n" + row(text="b", label="y")
TAGS = row(tokens=["a", "b"], tags=["x", "y"])
TOKEN, NUMBER = "classify.kind=token", "classify.kind=regression"
BAD: list[tuple[str, str, str]] = [
    (row(text="a"), "", "rows.jsonl:1: label: is missing or null; the row's fields are text;"),
    (row(text="a", label=0.5), "", "or true or false; for numbers set classify.kind=regression"),
    (row(text="a", label=["x"]), "", "rows.jsonl:1: label: is ['x'], not a label"),
    (row(text="a", label=""), "", "rows.jsonl:1: label: is '', not a label"),
    (row(sentence="a", label=1), "", "rows.jsonl:1: text: is missing or null, not text; the row's fields are label,"),
    (row(text="", label=1), "", "rows.jsonl:1: text: is empty"),
    (GOOD, "data.text_pair_field=other", "rows.jsonl:1: other: is missing or null, not text"),
    (row(text="a", label="x"), "", "data.label_field=label: all rows have the same label, which teaches nothing"),
    (row(text="a " * 90, label="x"), "", "no row of 1 is left to train on: 1 dropped as longer than 40 tokens"),
    (row(tokens=["a"], tags=[]), TOKEN, "rows.jsonl:1: tags: is an empty list"),
    (row(tokens=["a"], tags=["x", "y"]), TOKEN, "rows.jsonl:1: tags: has 2 labels for 1 words in tokens"),
    (row(tokens=["a", ""], tags=["x", "y"]), TOKEN, "rows.jsonl:1: tokens[1]: is empty"),
    (row(tokens=["a", 3], tags=["x", "y"]), TOKEN, "rows.jsonl:1: tokens[1]: is not a word"),
    (row(tokens=["a"], tags=[None]), TOKEN, "rows.jsonl:1: tags[0]: is None, not a label"),
    (TAGS, f"{TOKEN} data.tags_field=ner", "rows.jsonl:1: ner: is missing or null, not a list; the row's fields are"),
    (TAGS, f"{TOKEN} data.text_pair_field=x", "data.text_pair_field = 'x' is not read by classify.kind = token"),
    (row(text="a", label="x"), NUMBER, "rows.jsonl:1: label: is 'x', not a finite number"),
    (row(text="a", label=True), NUMBER, "rows.jsonl:1: label: is True, not a finite number"),
    ('{"text": "a", "label": NaN}', NUMBER, "rows.jsonl:1: label: is nan, not a finite number"),
    (GOOD, f"{NUMBER} classify.labels=[x,y]", "classify.labels is not read by classify.kind = regression"),
    (GOOD, "classify.labels=[x]", "classify.labels names one label; give two or more"),
    (GOOD, "classify.labels=[x,x]", "classify.labels names a label twice"),
    (GOOD, "data.format=tagged", "data.format = tagged contradicts classify.kind = sequence; remove it, for labelled"),
    (GOOD, "data.source=text", "data.source = text has no rows; give rows as jsonl or parquet"),
    (GOOD, "data.source=stdlib data.path=null classify.kind=token", "data.source = stdlib has labels for kind ="),
    (GOOD, "data.document_masking=true", "data.document_masking = true is not read by task = classify"),
    (GOOD, "mlm.probability=0.3", "mlm.probability = 0.3 is only read by task = mlm; remove it, or set task=mlm"),
    (GOOD, "task=mlm classify.kind=token", "classify.kind = 'token' is only read by task = classify"),
    (GOOD, "model.compile=true", "model.compile = true is not verified with rows, which task = classify"),
]


@pytest.mark.parametrize(("content", "overrides", "problem"), BAD)
def test_what_is_malformed_is_one_line_and_exit_code_2(show, tmp_path, content, overrides, problem) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    assert problem in error_of(show(*overrides.split(), code=2))
