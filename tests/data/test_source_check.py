"""Prepared data are compared with their source: sound ones of every template, and every planted mistake is found."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from config.load import load_config
from config.schema import Config
from config.task import settle_task
from data.corpora.source_check import wrong_preparation
from data.rows import prepare_rows as rows
from data.sources import chat
from data.text import prepare
from tests.support.rows.chat_templates import SHAPES
from tests.support.rows.chats import WORDS, byte_level, unigram, write_chats, write_pairs

Change = Callable[[chat.Tokens, PreTrainedTokenizerFast], tuple[np.ndarray, np.ndarray]]


def configured(folder: Path, *overrides: str, shape: str = "chatml", task: str = "sft", pieces: bool = False) -> Config:
    """A config of `rows.jsonl`, with a tokenizer that has the template of a shape. pieces: a Unigram."""
    special, text = [*dict.fromkeys(["</s>", "<s>", *SHAPES[shape].special])], " ".join(WORDS)
    own = unigram([*special, "<unk>"]) if pieces else byte_level(400, special, text)
    fast = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>", clean_up_tokenization_spaces=False)
    fast.chat_template = SHAPES[shape].jinja
    fast.save_pretrained(folder / "tokenizer")
    config = {
        "task": task,
        "model": {"architecture": "llama"},
        "data": {
            "source": "jsonl",
            "path": str(folder / "rows.jsonl"),
            "tokenizer": str(folder / "tokenizer"),
            "sequence_length": 8 if task == "pretrain" else 96,
            "cache_dir": str(folder / "cache"),
            "validation_fraction": 0.3,
        },
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    return settle_task(load_config(folder / "run.yaml", list(overrides), None))


def wrong(config: Config) -> list[str]:
    prepared = rows.prepare_rows if config.learns_rows else prepare.prepare
    return wrong_preparation(config, prepared(config.data, progress=False))


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant", "all"])
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_said_of_rows_in_any_template(tmp_path: Path, shape: str, train_on: str) -> None:
    write_chats(tmp_path / "rows.jsonl", 40)
    assert not wrong(configured(tmp_path, f"data.train_on={train_on}", shape=shape))


@pytest.mark.parametrize("too_long", ["drop", "truncate_left", "truncate_right"])
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_nothing_is_said_of_rows_that_are_cut_or_dropped(tmp_path: Path, task: str, too_long: str) -> None:
    (write_pairs if task == "dpo" else write_chats)(tmp_path / "rows.jsonl", 40)
    assert not wrong(configured(tmp_path, f"data.too_long={too_long}", "data.sequence_length=40", task=task))


@pytest.mark.parametrize("pieces", [False, True])
def test_nothing_is_said_of_texts_with_bad_rows_among_them(tmp_path: Path, pieces: bool) -> None:
    lines: list[Any] = [{"prompt": f"the model {number} ", "completion": "a token </s>"} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [*lines[:3], {"prompt": 1}, *lines[3:]])))
    assert not wrong(configured(tmp_path, "data.on_bad_row=skip", pieces=pieces))


def twice(row: chat.Tokens, _: Any) -> tuple[np.ndarray, np.ndarray]:
    return np.append(row.ids[0], row.ids), np.append(False, row.trained)


def all_learned(row: chat.Tokens, _: Any) -> tuple[np.ndarray, np.ndarray]:
    return row.ids, np.arange(len(row.ids)) > 0


def end_not_learned(row: chat.Tokens, tokenizer: PreTrainedTokenizerFast) -> tuple[np.ndarray, np.ndarray]:
    return row.ids, row.trained & (row.ids != tokenizer.convert_tokens_to_ids("<|im_end|>"))


def first_not_learned(row: chat.Tokens, _: Any) -> tuple[np.ndarray, np.ndarray]:
    return row.ids, row.trained & np.append(False, row.trained[:-1])


def one_answer(row: chat.Tokens, _: Any) -> tuple[np.ndarray, np.ndarray]:
    return row.ids, row.trained & (np.cumsum(np.diff(row.trained, prepend=False)) > 2)


def cut(row: chat.Tokens, _: Any) -> tuple[np.ndarray, np.ndarray]:
    return row.ids[:-2], row.trained[:-2]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        *((twice, "tokens"), (cut, "tokens"), (all_learned, "labels"), (end_not_learned, "labels")),
        *((first_not_learned, "labels"), (one_answer, "labels")),
    ],
)
def test_what_the_preparation_of_a_chat_does_wrong_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, what: str
) -> None:
    right = chat.Chat.tokens

    def tokens(self: chat.Chat, example: Any) -> chat.Tokens:
        ids, trained = change(right(self, example), self._tokenizer)
        return chat.Tokens(ids, trained if trained.any() else np.arange(len(ids)) == len(ids) - 1)

    monkeypatch.setattr(chat.Chat, "tokens", tokens)
    write_chats(tmp_path / "rows.jsonl", 40)
    found = wrong(configured(tmp_path))
    assert found and all(name.startswith(f"{what} of {tmp_path}/rows.jsonl:") for name in found)


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("overrides", [[], ["data.begin_of_document=none"], ["data.validation_fraction=0.03"]])
def test_nothing_is_said_of_documents(tmp_path: Path, overrides: list[str], pieces: bool) -> None:
    """With 0.03 none is drawn for validation, and the end of the longest is held out."""
    write_documents(tmp_path)
    assert not wrong(configured(tmp_path, *overrides, task="pretrain", pieces=pieces))


@pytest.mark.parametrize("defect", ["no end", "begins twice", "out of order"])
def test_what_the_preparation_of_documents_does_wrong_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    right = prepare.results

    def changed(tokens: np.ndarray) -> np.ndarray:
        ends = np.flatnonzero(tokens == 0) + 1
        return {"no end": tokens[tokens != 0], "begins twice": np.insert(tokens, ends, 1)}.get(defect, tokens[::-1])

    def results(*arguments: Any) -> Iterator[dict[str, np.ndarray]]:
        for batch in right(*arguments):
            yield batch | {split: changed(batch[split]) for split in ("train", "validation")}

    monkeypatch.setattr(prepare, "results", results)
    write_documents(tmp_path)
    found = wrong(configured(tmp_path, task="pretrain"))
    assert found and all(name.startswith("tokens of document ") for name in found)


def write_documents(folder: Path) -> None:
    documents = [{"text": f"model {number} </s> the loss\n\n of a step"} for number in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, documents)))
