"""Pairs of answers: how rows become them, which of their tokens count, and what is refused."""

import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from data.batches.loader import IGNORED_LABEL, NO_SAMPLE
from data.batches.preference_batches import REFERENCE, batches_of_pairs, lengths_of, lengths_of_corpus
from data.corpora.row_shards import RowShards
from data.sources.row_formats import BadRow, read_examples, recognise
from tests.support.rows.chats import write_base, write_pairs
from tests.support.runs.showing import Show, shower
from tools.analyze.survey import first_sequences

ASKED, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
)
MORE = {"role": "user", "content": "d"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"prompt": [ASKED], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"prompt": "a", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"prompt": "a", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [ASKED], "chosen": "b", "rejected": "c"},
    ],
)
def test_conversations_share_their_prompt(row: dict[str, Any]) -> None:
    assert recognise(row, "text") == "preference"
    first, second = read_examples(row, "preference", "text")
    assert (first.messages, second.messages) == ([ASKED, GOOD], [ASKED, BAD])
    assert first.context == second.context == 1


def test_texts_share_what_is_given_or_what_both_begin_with() -> None:
    def parts(**row: str) -> list[tuple[str, str]]:
        return [(side.prompt, side.completion) for side in read_examples(row, "preference", "text")]

    assert parts(prompt="p", chosen="b", rejected="c") == [("p", "b"), ("p", "c")]
    assert parts(chosen="a cat sat", rejected="a car") == [("a", " cat sat"), ("a", " car")]
    assert parts(prompt="", chosen="cat", rejected="car") == [("", "cat"), ("", "car")]


MALFORMED = [
    ({"chosen": "a"}, "rejected: is missing or null, not text"),
    ({"chosen": "a", "rejected": 1}, "rejected: is a number, not text"),
    ({"chosen": "a", "rejected": [BAD]}, "rejected: is a list and chosen is text; give both alike"),
    ({"prompt": "p", "chosen": "a", "rejected": "a"}, "rejected: is the same as chosen"),
    ({"prompt": 1, "chosen": "a", "rejected": "b"}, "prompt: is a number, not text"),
    ({"prompt": "p", "chosen": "", "rejected": "b"}, "chosen: is empty"),
    ({"chosen": [GOOD], "rejected": [BAD]}, "prompt: is missing, and chosen and rejected do not begin with the same"),
    ({"chosen": "cat", "rejected": "car"}, "prompt: is missing, and chosen and rejected do not begin with the same"),
    ({"question": "q", "chosen": "a b", "rejected": "a c"}, "prompt: is missing, and question would not be read"),
    ({"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD]}, "rejected: is the same as chosen"),
    ({"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD, MORE, BAD]}, "chosen: has no turn after the prompt"),
    ({"chosen": [ASKED, GOOD], "rejected": [ASKED, MORE]}, r"rejected\[1\].role: is 'user'; an answer starts with"),
    ({"prompt": [], "chosen": [GOOD], "rejected": [BAD]}, "prompt: is an empty list"),
    ({"chosen": [ASKED, 1], "rejected": [ASKED, BAD]}, r"chosen\[1\]: is a number, not an object"),
    ({"chosen": [], "rejected": [BAD]}, "chosen: is an empty list"),
]


@pytest.mark.parametrize(("row", "problem"), MALFORMED)
def test_what_does_not_fit_is_named_by_its_field(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadRow, match=f"^{problem}"):
        read_examples(row, "preference", "text")


def shards(lengths: list[tuple[int, int]], sequence_length: int = 64) -> RowShards:
    """Pairs of rows of so many tokens, of which the last two are trained; token = 100 x row + place."""
    flat = [length for both in lengths for length in both]
    tokens = np.concatenate([100 * row + np.arange(length) for row, length in enumerate(flat)]).astype(np.uint16)
    trained = np.concatenate([np.arange(length) >= length - 2 for length in flat]).astype(np.uint8)
    order = {"rows": np.arange(len(flat)), "ends": np.arange(2, len(flat) + 1, 2)}
    order |= {"lengths": np.array(flat, dtype=np.int32), "labels": np.full(len(flat), 2, dtype=np.int32)}
    parts = [{"tokens": tokens, "trained": trained, "ends": np.cumsum(flat)}]
    return RowShards(parts, order, sequence_length=sequence_length)


def test_numbers_of_sequences_are_those_of_their_rows_and_nothing_is_kept_of_each() -> None:
    """Every rank would keep it: of a billion rows some GB."""
    count, draw = 10**6, np.random.default_rng(0).integers
    ends = np.flatnonzero(np.append(draw(0, 3, count - 1) > 0, True)) + 1
    order = {"rows": np.random.default_rng(1).permutation(count), "ends": ends}
    order |= {"lengths": draw(2, 9, count, dtype=np.int32), "labels": draw(0, 3, count, dtype=np.int32)}
    data, asked = RowShards([], order, sequence_length=64), draw(0, len(ends), 500)
    tracemalloc.start()
    found = [data.places(asked), data.labels(asked), data.trained_rows(asked)]
    assert data.inputs == order["lengths"].sum() - count
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    rows = [data.rows_of(number) for number in asked.tolist()]
    assert max(map(len, rows)) > 3 and 0 in data.trained_rows(asked)
    assert found[0].tolist() == [int((order["lengths"][own] - 1).sum()) for own in rows]
    assert found[1].tolist() == [int(order["labels"][own].sum()) for own in rows]
    assert found[2].tolist() == [int((order["labels"][own] > 0).sum()) for own in rows]
    assert data.places(np.array([0, len(ends) - 1])).sum() > 0 and not len(data.places(np.arange(0)))


def test_a_batch_of_pairs_is_padded_to_one_of_a_few_lengths() -> None:
    assert (lengths_of(33, 64), lengths_of(1, 64), lengths_of(256, 256)) == ((16, 24, 40), (8,), (64, 128, 256))
    assert (lengths_of(20, 20), lengths_of(3, 5)) == ((8, 16, 20), (5,))
    data = shards([(5, 9), (12, 4), (34, 20)])
    data.columns[REFERENCE] = np.arange(3 * 3 * 2, dtype=np.float32).reshape(3, 3, 2)
    assert data.longest.tolist() == [8, 11, 33]
    make = batches_of_pairs(lengths_of(33, 64))
    ids = np.array([1, 0, 2, NO_SAMPLE])
    batch = make(data, 7, ids, ids[None, :2])
    assert batch.input_ids.shape == batch.further["targets"].shape == (1, 2, 2, 16)
    assert (batch.label_tokens, batch.label_tokens_of_all, batch.tokens) == (2, 3, 11 + 3 + 4 + 8 + 33 + 19)
    assert batch.labels.tolist() == [[0, 0]]
    assert batch.further[REFERENCE].tolist() == [[[6.0, 7.0], [0.0, 1.0]]]
    assert batch.input_ids[0, 1, 0].tolist() == [0, 1, 2, 3, *[0] * 12]
    assert batch.further["targets"][0, 1, 0].tolist() == [*[IGNORED_LABEL] * 2, 3, 4, *[IGNORED_LABEL] * 12]
    other = make(data, 7, ids, ids[None, 2:])
    assert other.input_ids.shape == (1, 2, 2, 40)
    assert other.labels.tolist() == [[0, IGNORED_LABEL]]
    assert other.further[REFERENCE].tolist() == [[[16.0, 17.0], [0.0, 0.0]]]
    assert first_sequences(other, 1).label_tokens == 1


def test_a_batch_is_no_longer_than_a_model_s_positions() -> None:
    data = shards([(101, 9)], sequence_length=100)
    lengths, ids = lengths_of_corpus(SimpleNamespace(train=data, validation=data)), np.arange(1)  # type: ignore[arg-type]
    batch = batches_of_pairs(lengths)(data, 0, ids, ids[None])
    assert (lengths, batch.input_ids.shape) == ((32, 56, 100), (1, 1, 2, 100))
    model = GPT2LMHeadModel(GPT2Config(n_positions=100, n_embd=8, n_layer=1, n_head=1, vocab_size=256))
    assert model(batch.input_ids[0, 0]).logits.shape == (2, 100, 256)


@pytest.fixture
def show(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Show:
    """`data.show` on a config for pairs.jsonl in the test's folder."""
    text = f"task: dpo\nmodel: {{name_or_path: {base}}}\ndata: {{source: auto, path: {tmp_path}/pairs.jsonl, "
    text += f"tokenizer: model, sequence_length: 96, cache_dir: {tmp_path}/cache, validation_fraction: 0}}\n"
    return shower(tmp_path / "run.yaml", text, capsys)


def test_show_prints_both_sides(show: Show, tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.jsonl", 6)
    long = {"prompt": [ASKED], "chosen": [{"role": "assistant", "content": "b " * 80}], "rejected": [BAD]}
    with (tmp_path / "pairs.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
    out = show("--rows", "1")
    assert out.index("--- 1, chosen: ") < out.index("--- 1, rejected: ")
    assert "--- 2" not in out
    assert "7 rows of format preference" in out
    assert "6 pairs to train on, 0 held out, 1 dropped" in out
    assert "7 pairs to train on, 0 held out, 1 truncated" in show("data.too_long=truncate_right")
    # of the rejected answer nothing would be left
    assert "6 pairs to train on" in show("data.too_long=truncate_left")


def test_pairs_that_cutting_makes_the_same_are_dropped(show: Show, tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.jsonl", 6)
    chosen, rejected = ([{"role": "assistant", "content": "b " * 120 + end}] for end in "cd")
    with (tmp_path / "pairs.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": [ASKED], "chosen": chosen, "rejected": rejected}) + "\n")
    out = show("data.too_long=truncate_right")
    assert "6 pairs to train on, 0 held out, 1 dropped because cutting left no difference; " in out
    assert "dropped, because cutting left no difference 1" in out


REFUSED = [
    ("preference.loss=hinge preference.label_smoothing=0.1", "preference.label_smoothing = 0.1 is only read by"),
    ("preference.beta=0", "preference.beta"),
    ("preference.reference=adapter_off", "preference.reference = adapter_off needs an adapter"),
    ("data.format=messages", "data.format = messages has no pairs, which task = dpo needs"),
    ("data.train_on=all", "data.train_on = all is not read by task = dpo"),
    ("model.loss=chunked", "model.loss = chunked computes a cross-entropy"),
    ("task=sft preference.beta=0.2", "preference.beta = 0.2 is only read by task = dpo"),
    ("task=sft data.format=preference", "data.format = preference has pairs of answers"),
    ("task=sft", "is a pair of answers, which only task=dpo reads; set it"),
    ("data.document_masking=true", "data.document_masking = true: rows are not packed"),
]


@pytest.mark.parametrize(("overrides", "problem"), REFUSED)
def test_what_contradicts_itself_is_one_line(show: Show, tmp_path: Path, overrides: str, problem: str) -> None:
    write_pairs(tmp_path / "pairs.jsonl", 2)
    said = show(*overrides.split(), code=2)
    assert problem in said and said.strip().splitlines()[-1].startswith("error: ")
