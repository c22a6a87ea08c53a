"""Prepare prompts once: read rows, render the prompt to sample answers from, and keep the whole row for its rewards.

It publishes as `prepare_rows` does, in one process. A shard's rows have no labels; besides tokens it holds `json` (n,)
uint8, the rows as JSON in UTF-8, and `json_bytes` (rows,) int64, the length of each.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from config.schema import DataSection
from data.corpora.corpus import TOKENIZER, Corpus, fingerprint_of_parts, lost
from data.corpora.row_shards import RowShards
from data.rows.packing import by_number
from data.rows.prepare_rows import make_encoder, rows_fingerprint, template_of
from data.rows.row_preparation import BatchEncoder, EncodedRows, Preparation, Row, batches_of, source_of_texts
from data.sources.chat import Chat
from data.sources.row_formats import BadRow, Example, read_example, recognise
from data.sources.sources import Source
from data.text.preparation_progress import ProgressFile
from data.text.prepare import prepared
from data.text.tokenizer import make_tokenizer

_VERSION = "prompts-1"


def prepare_prompts(data: DataSection, *, progress: bool) -> Corpus:
    """The prompts that a config names, prepared first if need be. Raises UserError."""

    def fingerprint(data: DataSection, source: Source) -> str:
        return fingerprint_of_parts([_VERSION, rows_fingerprint(data, source)])

    return prepared(data, fingerprint, _fill, progress=progress)


def read_prompt(row: dict[str, Any], data: DataSection) -> Example:
    """The row without an answer: its column `prompt`, or its turns without the final answer. Raises BadRow."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        if not prompt:
            raise BadRow("prompt", "is empty")
        return Example(prompt=prompt)
    if prompt is not None:
        return read_example({**row, "messages": prompt}, "messages", data.text_field, data.source)
    form = recognise(row, data.text_field) if data.format == "auto" else data.format
    if form not in ("messages", "sharegpt", "alpaca"):
        raise BadRow("prompt", f"is missing; the row's fields are {', '.join(sorted(row))}")
    example = read_example(row, form, data.text_field, data.source)
    messages = list(example.messages or [])
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise BadRow("messages", "has no turn to answer")
    return Example(messages, example.tools, example.template_options, example.prompt)


def row_of(shards: RowShards, sample: int) -> tuple[np.ndarray, dict[str, Any]]:
    """A prompt's tokens (n,), and its whole row."""
    [number] = shards.rows_of(sample)
    shard, index, part = shards.found(number)
    end = int(shard["json_bytes"][: index + 1].sum())
    text = shard["json"][end - int(shard["json_bytes"][index]) : end]
    return shard["tokens"][part].astype(np.int64), json.loads(text.tobytes())


class PromptEncoder(BatchEncoder):
    """Turns rows into prompts' tokens with one tokenizer and its chat template."""

    def __init__(self, data: DataSection, chat: Chat) -> None:
        super().__init__(data)
        self._chat = chat
        self._longest = data.sequence_length - data.label_length

    def encode(self, row: dict[str, Any], found: EncodedRows) -> list[Row]:
        """The tokens and the row; nothing if data.too_long drops it."""
        tokens = self._chat.prompt(read_prompt(row, self.data))
        if not len(tokens):
            raise BadRow("prompt", "has no token")
        found.longest |= Counter(row=len(tokens))
        if len(tokens) > self._longest:
            found.counts["dropped" if self.data.too_long == "drop" else "truncated"] += 1
            if self.data.too_long == "drop":
                return []
            left = self.data.too_long == "truncate_left"
            tokens = tokens[-self._longest :] if left else tokens[: self._longest]
        text = np.frombuffer(json.dumps(row, ensure_ascii=False, default=str).encode(), dtype=np.uint8)
        kept = {"tokens": tokens, "trained": np.zeros(len(tokens), np.uint8)}
        return [kept | {"json": text, "json_bytes": np.array(len(text), np.int64)}]


def _tokenizer(data: DataSection, source: Source) -> PreTrainedTokenizerFast:
    def texts_of(row: dict[str, Any]) -> Iterator[str]:
        example = read_prompt(row, data)
        yield example.prompt or "\n".join(str(message["content"]) for message in example.messages or [])
        yield from (value for key, value in row.items() if key != "prompt" and isinstance(value, str))

    return make_tokenizer(data.tokenizer, source_of_texts(data, source, texts_of), 0.0)


def _fill(data: DataSection, source: Source, fingerprint: str, folder: Path, report: ProgressFile) -> None:
    report("making the tokenizer for")
    tokenizer = _tokenizer(data, source)
    tokenizer.chat_template = template_of(data) or tokenizer.chat_template
    preparation = Preparation(data, source, folder, tokenizer)
    encode = PromptEncoder(data, make_encoder(replace(data, target_length=None), str(folder / TOKENIZER)).chat)
    preparation.write(map(encode, batches_of(data, source)), by_number, report)
    preparation.require_rows(f"{data.sequence_length - data.label_length} tokens")
    counts = preparation.counts()
    note = f"data: {preparation.train.rows:,} prompts to train on, {preparation.validation.rows:,} held out"
    note += f"{lost(counts)}; the longest has {counts['longest']:,} tokens"
    preparation.publish(fingerprint, [note])
