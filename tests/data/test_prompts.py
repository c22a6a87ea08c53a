"""Prompts: what an answer is sampled after, of every form of rows, and the whole row beside it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from config.schema import DataSection
from data.corpora.corpus import Corpus
from data.corpora.row_shards import RowShards
from data.rows.prepare_prompts import prepare_prompts, row_of
from tests.support.refusals import refused
from tests.support.rows.chats import write_base
from tests.support.rows.jsonl import write_jsonl

ASKED = [{"role": "system", "content": "the mask"}, {"role": "user", "content": "step a"}]
SAID = [*ASKED, {"role": "assistant", "content": "save"}]
TURNS = [{"from": "human", "value": "step a"}, {"from": "gpt", "value": "save"}]
WRITTEN = "<|im_start|>system\nthe mask<|im_end|>\n<|im_start|>user\nstep a<|im_end|>\n<|im_start|>assistant\n"
ROWS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "the loss", "answer": "7"}, "the loss"),
    ({"prompt": ASKED, "answer": {"x": [1, None]}}, WRITTEN),
    ({"messages": SAID, "answer": "ü"}, WRITTEN),
    ({"messages": ASKED}, WRITTEN),
    ({"conversations": TURNS}, "<|im_start|>user\nstep a<|im_end|>\n<|im_start|>assistant\n"),
    ({"instruction": "step a", "output": "save"}, "<|im_start|>user\nstep a<|im_end|>\n<|im_start|>assistant\n"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("prompts")
    write_base(made / "base")
    return made


def prepared(folder: Path, rows: list[dict[str, Any]], name: str, **given: Any) -> Corpus:
    path = write_jsonl(folder / f"{name}.jsonl", rows)
    data = DataSection(source="jsonl", path=str(path), tokenizer=f"{folder}/base", cache_dir=f"{folder}/cache")
    data = replace(data, validation_fraction=0.0, sequence_length=64, target_length=8, packing="none")
    return prepare_prompts(replace(data, **given), progress=False)


def test_prompts_of_every_form_with_their_rows(folder: Path) -> None:
    corpus = prepared(folder, [row for row, _ in ROWS], "forms")
    tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer_folder)
    assert isinstance(corpus.train, RowShards) and corpus.train.sequences(64) == len(ROWS)
    for number, (row, text) in enumerate(ROWS):
        tokens, kept = row_of(corpus.train, number)
        assert tokenizer.decode(tokens) == text
        assert kept == row


def test_the_tokenizer_is_kept_with_the_template_of_the_prompts(folder: Path) -> None:
    """A run's export, its samples and its model card have this tokenizer."""
    (folder / "short.jinja").write_text("{% for turn in messages %}{{ turn.content }}!{% endfor %}")
    corpus = prepared(folder, [row for row, _ in ROWS], "forms", chat_template=f"{folder}/short.jinja")
    tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer_folder)
    assert isinstance(corpus.train, RowShards)
    assert tokenizer.decode(row_of(corpus.train, 1)[0]) == tokenizer.apply_chat_template(ASKED, tokenize=False)


def test_long_prompts_leave_room_for_the_answer(folder: Path) -> None:
    rows = [{"prompt": "the loss"}, {"prompt": "the loss " * 40}]
    assert prepared(folder, rows, "long").counts["dropped"] == 1
    corpus = prepared(folder, rows, "long", too_long="truncate_left")
    assert isinstance(corpus.train, RowShards)
    assert [len(row_of(corpus.train, number)[0]) for number in range(2)][1] == 64 - 8


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": ""}, "prompt: is empty"),
        ({"question": "x"}, "has no known format"),
        ({"messages": SAID[2:]}, "messages: has no turn to answer"),
        ({"text": "x"}, "prompt: is missing; the row's fields are text"),
    ],
)
def test_a_row_without_a_prompt_is_named(folder: Path, row: dict[str, Any], problem: str) -> None:
    said = refused(prepared, folder, [{"prompt": "a"}, row], "bad", on_bad_row="error")
    assert "bad.jsonl:2: " in said and problem in said
