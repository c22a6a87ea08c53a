"""Comparison of prepared data with their source: its first documents or rows again, by transformers' own means.

Tokens are those of the tokenizer's call on the whole text. Labels are located otherwise than by the preparation
(data/sources/chat.py): two characters that no text has are put around a turn's content before the template renders it.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from config.schema import Config, DataSection
from data.corpora.corpus import Corpus, open_corpus
from data.corpora.mix import section_of
from data.corpora.row_shards import RowShards
from data.corpora.shards import TokenShards
from data.sources.row_formats import BadRow, Example, Found, read_examples
from data.sources.row_sources import located_rows
from data.sources.sources import Source, open_source
from data.text.encode import encoder_of_text
from data.text.tokenizer import load_tokenizer

_ITEMS = 32  # documents or rows
_LONGEST = 1 << 17
"""[characters] Longer documents are tokenized in pieces: the start of the first one is compared, and none after it."""
_FEW = 1000  # tokens
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
"""Characters of a private use area."""

Side = tuple[np.ndarray, np.ndarray]
"""(n,) token ids, and (n,) int8 whether each has to be a label: 1 or 0, or -1 where it is not known."""


def wrong_preparation(config: Config, corpus: Corpus) -> list[str]:
    """Differences between the first documents or rows of the (first) source and their tokens and labels on disk. Raises
    ValueError with the reason where these are not compared, and the errors of reading the source."""
    data = section_of(config.data, config.data.sources[0]) if config.data.sources else config.data
    source = open_source(data)
    if source.identity.startswith("hub:"):
        raise ValueError("the hub's rows may have changed since they were prepared")
    corpus = open_corpus(corpus.folder, verify=False)  # of one source, and without a held-out end
    if isinstance(corpus.train, TokenShards):
        return _wrong_documents(source, corpus, begins=config.task != "mlm" and data.begin_of_document == "auto")
    if config.task not in ("sft", "dpo", "distill") or not isinstance(corpus.train, RowShards):
        raise ValueError(f"rows of task={config.task} are not prepared again")
    return _wrong_rows(data, located_rows(data, source), corpus, corpus.train)


def _wrong_documents(source: Source, corpus: Corpus, *, begins: bool) -> list[str]:
    tokenizer = load_tokenizer(corpus.tokenizer_folder)
    if source.ids_field is not None:
        raise ValueError("documents that are tokens already are not prepared again")
    lead, of_text = _leading(tokenizer) if begins else [], _of_text(tokenizer)
    splits: list[Any] = [corpus.train, corpus.validation]
    splits = [split.shards[0].array for split in splits if split.shards]
    places, wrong = [0] * len(splits), list[str]()
    for number, text in enumerate(islice(source.documents(Counter()), _ITEMS), 1):
        ids = [*lead, *of_text(text[:_LONGEST], add_special_tokens=False, split_special_tokens=True).input_ids]
        expected = np.array([*ids, corpus.end_of_document] if len(text) <= _LONGEST else ids[:_FEW])
        for which, (tokens, place) in enumerate(zip(splits, places, strict=True)):
            stored = tokens[place : place + len(expected)]
            # the end of a shard cuts a document
            if len(stored) and np.array_equal(stored, expected[: len(stored)]):
                places[which] += len(stored)
                break
        else:
            wrong.append(f"tokens of document {number}")
        if len(text) > _LONGEST:
            break
    return wrong


def _wrong_rows(data: DataSection, rows: Iterable[Found], corpus: Corpus, train: RowShards) -> list[str]:
    tokenizer, counts = load_tokenizer(corpus.tokenizer_folder), corpus.counts
    of_text = _of_text(tokenizer)
    control = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    splits: list[Any] = [train, corpus.validation]
    places = [0, 0]
    missing, wrong = list[str](), list[str]()
    for where, row in islice(rows, _ITEMS):
        try:
            if isinstance(row, BadRow):
                raise row
            examples = read_examples(row, counts["format"], data.text_field, data.source)
            sides = [_side(tokenizer, of_text, control, one, data) for one in examples]
        except BadRow:
            continue
        kept = _fitted(sides, data)
        for which, (split, place) in enumerate(zip(splits, places, strict=True)):
            stored = [split.row(place + at) for at in range(len(kept)) if place + at < split.rows]
            if kept and [ids.tolist() for ids, _ in stored] == [ids.tolist() for ids, _ in kept]:
                places[which] += len(kept)
                alike = all(
                    np.array_equal(trained[known >= 0], known[known >= 0])
                    for (_, trained), (_, known) in zip(stored, kept, strict=True)
                )
                wrong += [] if alike else [f"labels of {where}"]
                break
        else:
            missing += [f"tokens of {where}"] if kept else []
    lost = sum(value for key, value in counts.items() if key.startswith(("dropped", "skipped")))
    return wrong + (missing if len(missing) > lost else [])


def _fitted(sides: list[Side], data: DataSection) -> list[Side]:
    """Sides cut to the longest length, none if they are dropped."""
    longest = data.sequence_length + 1
    excess = max(len(ids) for ids, _ in sides) - longest
    if excess <= 0:
        return sides
    if data.too_long == "drop":
        return []
    part = slice(excess, None) if data.too_long == "truncate_left" else slice(longest)
    return [(ids[part], np.concatenate([[0], known[part][1:]])) for ids, known in sides]


def _side(tokenizer: Any, of_text: Any, control: dict[int, str], example: Example, data: DataSection) -> Side:
    """A row's tokens and labels. of_text: see `_of_text`. control: the tokenizer's control tokens. Raises BadRow."""
    if example.messages is None or tokenizer.chat_template is None:
        text, start = example.prompt + example.completion, 0 if data.train_on == "all" else len(example.prompt)
        ids, ends = _located(of_text, text, plain=True)
        lead, end = _leading(tokenizer), tokenizer.eos_token_id
        known = np.concatenate([np.zeros(len(lead)), ends > start, [1]]).astype(np.int8)
        known[0] = 0
        return np.array([*lead, *ids, end]), known
    text = _render(tokenizer, example, example.messages)
    ids, ends = _located(tokenizer, text, plain=False)
    starts, known = np.concatenate([[0], ends[:-1]]), np.full(len(ids), -1, dtype=np.int8)
    special = np.isin(ids, [*control])
    spoken = [number for number, message in enumerate(example.messages) if message["role"] == "assistant"]
    answers = [number for number in spoken if number >= example.context]
    answers = answers[-1:] if data.train_on == "last_assistant" else answers
    ended = bool(special[-1])
    for number in range(len(example.messages)):
        if (found := _content(tokenizer, example, text, number)) is None:
            ended = True
            continue
        known[(starts < found[1]) & (ends > found[0]) & ~special] = number in answers
        after = np.flatnonzero(starts >= found[1])
        if number in answers and len(after) and special[after[0]]:  # the token that ends the turn
            known[after[0]] = 1
        ended = bool(special[after].any())
    if data.train_on == "all":
        known[:], ended = 1, bool(special[-1]) or text.rstrip().endswith(tuple(control.values()))
    known[0] = 0
    if not ended and (data.train_on == "all" or spoken[-1:] == [len(example.messages) - 1]):
        # the template has no token that ends a turn
        ids, known = np.append(ids, tokenizer.eos_token_id), np.append(known, np.int8(1))
    return ids, known


def _content(tokenizer: Any, example: Example, text: str, number: int) -> tuple[int, int] | None:
    """First and last character of a turn's content in the rendered text; None where the template changes it."""
    messages = list(example.messages or [])
    content: Any = messages[number].get("content")
    if not isinstance(content, str) or not (core := content.strip()):
        return None
    messages[number] = {**messages[number], "content": content.replace(core, f"{_OPEN}{core}{_CLOSE}", 1)}
    marked = _render(tokenizer, example, messages)
    start, end = marked.find(_OPEN), marked.find(_CLOSE) - 1
    return (start, end) if 0 <= start < end and marked.replace(_OPEN, "").replace(_CLOSE, "") == text else None


def _render(tokenizer: Any, example: Example, messages: list[dict[str, Any]]) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(messages, tools=example.tools, tokenize=False, **example.template_options)
        )
    except Exception as error:
        raise BadRow("messages", "are refused by the chat template") from error


def _of_text(tokenizer: Any) -> Any:
    """The tokenizer for text that holds no control tokens; split_special_tokens does not keep a Unigram from them."""
    if not isinstance(tokenizer.backend_tokenizer.model, models.Unigram):
        return tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=encoder_of_text(tokenizer.backend_tokenizer.to_str()))


def _leading(tokenizer: Any) -> list[int]:
    """Tokens that the tokenizer puts before a text, found apart from the preparation's `leading_tokens`."""
    whole, alone = (tokenizer("a", add_special_tokens=added).input_ids for added in (True, False))
    return list(whole[: whole.index(alone[0])]) if alone and alone[0] in whole else []


def _located(tokenizer: Any, text: str, *, plain: bool) -> tuple[np.ndarray, np.ndarray]:
    """(n,) tokens of a text, and (n,) the position after the last character of each."""
    found = tokenizer(text, add_special_tokens=False, split_special_tokens=plain, return_offsets_mapping=True)
    ends = np.array([end for _, end in found.offset_mapping], dtype=np.int64)
    return np.array(found.input_ids, dtype=np.int64), np.maximum.accumulate(ends)
