"""Rows for an encoder-decoder: a source that the encoder reads, and a target that the decoder learns.

Both are encoded by the transformers tokenizer with special tokens, and a target always ends with the end-of-text token.
A conversation's target is its last turn, which must be the assistant's. A prepared row is its source followed by its
target, all of which is labels.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from config.schema import DataSection
from data.sources.chat import Chat, Tokens
from data.sources.row_formats import BadRow, Example, Messages

_PADDING = "<pad>"


class SourceAndTarget(Chat):
    """Turns examples into a source and a target with one tokenizer, and cuts them if too long."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, template: str | None) -> None:
        """template: Jinja that replaces the tokenizer's own."""
        super().__init__(tokenizer, template=template, train_on="assistant")
        special = np.array(self._encoder.encode("a").special_tokens_mask, dtype=bool)
        text = np.flatnonzero(~special)
        self._before, self._after = int(text[0]), len(special) - 1 - int(text[-1])

    def tokens(self, example: Example) -> Tokens:
        """The source, and the target as labels. Raises BadRow if there is no target or the template refuses the row."""
        messages = example.messages
        if messages is not None and (self.template is not None or not example.prompt):
            source, target, control = *self._of_turns(example, messages), True
        else:
            source, target, control = example.prompt, example.completion, False
        asked = self._text_ids(source, control_tokens=control and self.template is not None)
        answer = self._text_ids(target, control_tokens=False)
        if not len(asked):
            raise BadRow("prompt", "is empty, and the tokenizer adds no token that an encoder could read")
        if not len(answer) or answer[-1] != self._tokenizer.eos_token_id:
            answer = np.append(answer, self._tokenizer.eos_token_id)
        return Tokens(np.concatenate([asked, answer]), np.arange(len(asked) + len(answer)) >= len(asked))

    def fitted(self, row: Tokens, data: DataSection, counts: Counter[str]) -> list[Tokens]:
        """The row, both sides cut to their maximum lengths (a target loses its end), or nothing; updates `counts`."""
        source, target = sides(row.ids, row.trained)
        too_long = len(source) > data.sequence_length, len(target) > data.label_length
        if not any(too_long):
            return [row]
        if data.too_long == "drop":
            counts["dropped"] += 1
            return []
        counts["truncated"] += 1
        for name, cut in zip(("source", "target"), too_long, strict=True):
            counts[f"truncated {name}s"] += cut
        if too_long[0]:
            end = len(source) - self._after
            room = max(data.sequence_length - self._before - self._after, 0)
            start = end - room if data.too_long == "truncate_left" else self._before
            kept = slice(start, start + room)
            source = np.concatenate([source[: self._before], source[kept], source[end:]])[: data.sequence_length]
        target = target[: data.label_length]
        return [Tokens(np.concatenate([source, target]), np.arange(len(source) + len(target)) >= len(source))]

    def _of_turns(self, example: Example, messages: Messages) -> tuple[str, str]:
        """The text of all turns before the last one, and that of the last."""
        self._refuse_control_tokens(example)
        last, where = messages[-1], f"messages[{len(messages) - 1}]"
        if last["role"] != "assistant":
            raise BadRow(f"{where}.role", f"is {last['role']!r}; the target is the last turn, which is the assistant's")
        if not isinstance(last["content"], str) or last.get("tool_calls"):
            raise BadRow(where, "is not plain text, as a target must be")
        if len(messages) == 1:
            raise BadRow("messages", "has no turn before the answer, which would be the source")
        if self.template is not None:
            return self._whole(example, messages[:-1], generate=True), last["content"]
        if len(messages) > 2 or not isinstance(messages[0]["content"], str):
            problem = "has more than a question and an answer, and the tokenizer has no chat template to join turns"
            raise BadRow("messages", f"{problem}; set data.chat_template")
        return messages[0]["content"], last["content"]

    def _text_ids(self, text: str, *, control_tokens: bool) -> np.ndarray:
        """Ids of a text with the special tokens that the tokenizer adds. control_tokens: the text may spell some."""
        encoder = self._encoder if control_tokens else self._encoder_of_text
        return np.array(encoder.encode(text).ids, dtype=np.int64)


def sides(ids: np.ndarray, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Source and target of a row: (n,) ids, and (n,) whether each belongs to the target."""
    start = int(np.argmax(trained))
    return ids[:start], ids[start:]


def for_encoder_decoder(tokenizer: PreTrainedTokenizerFast) -> None:
    """Give a tokenizer made here a padding token, and let it end every text with the end-of-text token."""
    tokenizer.add_special_tokens({"pad_token": _PADDING})
    end = str(tokenizer.eos_token)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
