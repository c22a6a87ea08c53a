"""An example as tokens, and which of them are trained on: the answers, each with the token that ends it.

Answers are located in a conversation's text by the template's generation markers if it has them, else by differences:
answer i lies between the rendering of the turns before it, with the generation prompt, and the rendering up to and
including it. Both must be prefixes of the whole text; other templates are refused. The whole text is tokenized once,
and a token is trained on if it has a character of an answer. (`return_assistant_tokens_mask` of transformers 5.23 marks
everything after an answer that ends in the first token of the text: github.com/huggingface/transformers/issues/47325.)
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from config.errors import one_line
from data.sources.row_formats import BadRow, Example, Messages
from data.text.encode import encoder_of_text

Spans = list[tuple[int, int]]
"""First character of each answer, and the position after its last, in order."""


@dataclass(frozen=True)
class Tokens:
    """One row, ready to train on."""

    ids: np.ndarray
    """(n,) int64"""
    trained: np.ndarray
    """(n,) bool: whether the token is a label. The first one never is, since nothing comes before it."""


class Chat:
    """Turns examples into tokens with one tokenizer and one template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, template: str | None, train_on: str) -> None:
        """template: Jinja that replaces the tokenizer's own. train_on: assistant, last_assistant or all."""
        self._tokenizer, self._train_on = tokenizer, train_on
        own: Any = tokenizer.chat_template
        self.template = template or (own.get("default") if isinstance(own, dict) else own)
        """None if there is none."""
        self.has_markers = self.template is not None and _MARKER.search(self.template) is not None
        self._special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special.update(tokenizer.all_special_ids)
        words = {str(tokenizer.convert_ids_to_tokens(i)) for i in self._special}
        self._words = tuple(sorted(words, key=len, reverse=True))
        self._control = re.compile("|".join(map(re.escape, self._words))) if words else None
        self._encoder = _with_exact_offsets(tokenizer)
        self._encoder_of_text = encoder_of_text(self._encoder.to_str())
        self._leading = leading_tokens(self._encoder)

    def renders(self, example: Example) -> bool:
        """Whether the chat template makes the row's text."""
        return example.messages is not None and self.template is not None

    def tokens(self, example: Example) -> Tokens:
        """Tokens of the row. Raises BadRow if the template refuses it, or it has no answer that can be located."""
        self._require_template(example)
        found = self._of_conversation(example) if self.renders(example) else self._of_texts(example)
        if not found.trained.any():
            raise BadRow("", "has no token to train on")
        return found

    def prompt(self, example: Example) -> np.ndarray:
        """(n,) int64: the prompt to sample an answer from, for a conversation or `example.prompt`. Raises BadRow."""
        self._require_template(example)
        if not self.renders(example):
            return self._text_ids(example.prompt, control_tokens=False)
        self._refuse_control_tokens(example)
        return self._text_ids(self._whole(example, example.messages or [], generate=True), control_tokens=True)

    def _text_ids(self, text: str, *, control_tokens: bool) -> np.ndarray:
        """Ids of a whole text. control_tokens: a template wrote it, which also put the tokens that begin a text."""
        leading = np.array([] if control_tokens else self._leading, dtype=np.int64)
        return np.concatenate([leading, self._encode(text, [], control_tokens=control_tokens)[0]])

    def end_of_turn(self) -> int | None:
        """The control token that ends an answer in the template; None without one."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            found = self.tokens(Example(messages=turns))
        except BadRow:
            return None
        last = int(found.ids[found.trained][-1])
        return last if last in self._special else None

    def _require_template(self, example: Example) -> None:
        """Raises BadRow for a conversation without a template to render it."""
        if example.messages is not None and not (self.renders(example) or example.prompt):
            problem = (
                "is a conversation, and the tokenizer has no chat template; set data.chat_template to a file of one"
            )
            raise BadRow("", problem, of_config=True)

    def _of_texts(self, example: Example) -> Tokens:
        """Prompt and completion as one text, then the end of the document. Text like a control token stays text."""
        text = example.prompt + example.completion
        start = 0 if self._train_on == "all" else len(example.prompt)
        ids, trained = self._encode(text, [(start, len(text))], control_tokens=False)
        lead = np.array(self._leading, dtype=np.int64)
        end = np.array([self._tokenizer.eos_token_id], dtype=np.int64)
        ids, trained = np.concatenate([lead, ids, end]), np.concatenate([lead < 0, trained, end >= 0])
        trained[0] = False
        return Tokens(ids, trained)

    def _of_conversation(self, example: Example) -> Tokens:
        messages = example.messages or []
        self._refuse_control_tokens(example)
        spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        answers = [index for index in spoken if index >= example.context]
        if not answers and self._train_on != "all":
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages[example.context :]))
            raise BadRow("messages", f"has no assistant's turn to train on, its roles are {roles}")
        text = self._whole(example, messages)
        if self._train_on == "all":
            spans, ends = [(0, len(text))], [len(text)]
        else:
            if self._train_on == "last_assistant":
                answers = answers[-1:]
            marked = self._marked(example, text) if self.has_markers else None
            if marked is not None and example.context:
                marked = marked[-len(answers) :] if len(marked) == len(spoken) else None
            if marked is None:
                spans = [self._difference(example, text, index) for index in answers]
                ends = [end for _, end in spans]
            else:
                spans = marked[-1:] if self._train_on == "last_assistant" else marked
                ends = self._turn_ends(example, text, answers, spans)
        ids, trained = self._encode(text, spans, control_tokens=True, ends=ends)
        # in a text that is learned whole, white space may follow the token that ends it, as in ChatML
        ended = int(ids[-1]) in self._special or (self._train_on == "all" and text.rstrip().endswith(self._words))
        if trained[-1] and not ended:  # nothing in the template says where the answer ends
            ids, trained = np.append(ids, self._tokenizer.eos_token_id), np.append(trained, True)
        trained[0] = False
        return Tokens(ids, trained)

    def _whole(self, example: Example, messages: Messages, *, generate: bool = False) -> str:
        """The text of a conversation. Raises BadRow if the template leaves out its tools, their calls or a part of a
        content that is a list, or writes the list as it is."""
        text = self._render(example, messages, generate=generate)
        marked = [{**message, "content": _marked_parts(message["content"])} for message in messages]
        if marked != messages and _PLACEHOLDER in self._render(example, marked, generate=generate):
            raise BadRow(
                "messages", f"have a content that is a list, which the chat template writes as it is; {_PARTS}"
            )
        others = [("tools", replace(example, tools=None), messages)] if example.tools else []
        for index, message in enumerate(messages):
            for key, silent in _silenced(message):
                changed = [*messages[:index], silent, *messages[index + 1 :]]
                others.append((f"messages[{index}].{key}", example, changed))
        for where, without, turns in others:
            rendered = None
            with suppress(BadRow):  # a template that refuses the rest reads them
                rendered = self._render(without, turns, generate=generate)
            if rendered == text:
                advice = _PARTS if "content" in where else "set data.chat_template to one that has it"
                raise BadRow(where, f"is left out by the chat template; {advice}")
        return text

    def _render(self, example: Example, messages: Messages, *, generate: bool = False) -> str:
        """The text of some turns. generate: followed by the generation prompt."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=example.tools,
                    chat_template=self.template,
                    add_generation_prompt=generate,
                    tokenize=False,
                    **example.template_options,
                )
            )
        except Exception as error:  # a template may raise anything, besides Jinja's own errors
            raise BadRow("messages", f"are refused by the chat template ({one_line(error, 200)})") from error

    def _marked(self, example: Example, text: str) -> Spans | None:
        """The spans between the template's generation markers; None if it marked nothing in this conversation."""
        variables = {**self._tokenizer.special_tokens_map, **example.template_options}
        found: Any = render_jinja_template(  # its return annotation is outdated
            conversations=[example.messages or []],
            tools=example.tools,
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **variables,
        )
        (rendered,), (spans,) = found
        if rendered != text:
            raise BadRow("messages", "render differently each time, so answers cannot be located")
        return list(spans) or None

    def _difference(self, example: Example, text: str, index: int) -> tuple[int, int]:
        """The span of one answer, found by rendering the conversation before and up to it. Raises BadRow."""
        messages, where = example.messages or [], f"messages[{index}]"
        before = self._render(example, messages[:index], generate=True)
        upto = text if index + 1 == len(messages) else self._render(example, messages[: index + 1])
        for part, what in ((before, "the turns before it"), (upto, "the turns up to it")):
            if not text.startswith(part):
                at = len(os.path.commonprefix([part, text]))
                problem = (
                    f"cannot be located: the chat template renders {what} differently once others follow "
                    f"({part[at : at + 30]!r} became {text[at : at + 30]!r}); set data.train_on=last_assistant, or "
                    "data.chat_template to one with generation markers"
                )
                raise BadRow(where, problem)
        start = len(before)
        if before == self._render(example, messages[:index]):  # the template has no prompt to generate
            marked = self._render(example, [*messages[:index], {**messages[index], "content": _PLACEHOLDER}])
            start = max(start, marked.find(_PLACEHOLDER))
        return start, len(upto)

    def _turn_ends(self, example: Example, text: str, answers: list[int], spans: Spans) -> list[int]:
        """End of each marked answer's turn: a marker may close before the token that ends the turn."""
        messages = example.messages or []
        if len(answers) != len(spans):
            return [end for _, end in spans]
        found = []
        for index, (_, end) in zip(answers, spans, strict=True):
            upto = text if index + 1 == len(messages) else self._render(example, messages[: index + 1])
            found.append(len(upto) if text.startswith(upto) else end)
        return found

    def _encode(
        self, text: str, spans: Spans, *, control_tokens: bool, ends: list[int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the text, and which of them belong to the spans. ends: end of each span's turn."""
        encoder = self._encoder if control_tokens else self._encoder_of_text
        encoding = encoder.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int64)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        trained = np.zeros(len(ids), dtype=bool)
        for number, (start, end) in enumerate(spans):
            inside = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
            first = int(inside[0]) if len(inside) else int(np.searchsorted(offsets[:, 0], start))
            last = int(inside[-1]) if len(inside) else first - 1  # an empty answer: only its end is trained on
            if ends is not None and self._train_on != "all":
                last = self._to_end_of_turn(text, ids, offsets, first, last, ends[number])
            trained[first : last + 1] = True
        return ids, trained

    def _to_end_of_turn(
        self, text: str, ids: np.ndarray, offsets: np.ndarray, first: int, last: int, turn_end: int
    ) -> int:
        """`last` moved to the control token that ends the turn, if only white space lies between them."""
        back = last
        while back > first and not text[offsets[back, 0] : offsets[back, 1]].strip():
            back -= 1
        if back >= first and int(ids[back]) in self._special:
            return back
        ahead = last + 1
        while ahead < len(ids) and offsets[ahead, 1] <= turn_end:
            if int(ids[ahead]) in self._special:
                return ahead
            if text[offsets[ahead, 0] : offsets[ahead, 1]].strip():
                break
            ahead += 1
        return last

    def _refuse_control_tokens(self, example: Example) -> None:
        """Raises BadRow for text that would become a control token, such as the one that ends its turn."""
        places = [
            (f"messages[{index}].{key}", message.get(key))
            for index, message in enumerate(example.messages or [])
            for key in ("content", "reasoning_content", "tool_calls")
        ]
        for where, value in (*places, ("tools", example.tools)):
            for part in _texts(value):
                found = self._control.search(part) if self._control else None
                if found is not None:
                    raise BadRow(where, f"spells the control token {found[0]} and would become it; remove it")


_PARTS = "write the content as one text, or set data.chat_template to one that reads parts"
_PLACEHOLDER = "PLACEHOLDER4711"
"""Rendered in place of an answer to see where its content would begin."""
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


def _marked_parts(content: Any) -> Any:
    """A content whose parts, if it has some, have a key that no template reads."""
    return [{**part, _PLACEHOLDER: ""} for part in content] if isinstance(content, list) else content


def _silenced(message: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The message without what a template may leave out: its calls of tools, and each part of its content."""
    if message.get("tool_calls"):
        yield "tool_calls", {key: value for key, value in message.items() if key != "tool_calls"}
    parts = message["content"] if isinstance(message["content"], list) else []
    for at, part in enumerate(parts):
        if str(part.get("text", part)).strip():  # white space may be trimmed away
            yield f"content[{at}]", {**message, "content": parts[:at] + parts[at + 1 :]}


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in chain(value, value.values()) if isinstance(value, dict) else value:
            yield from _texts(part)


def _with_exact_offsets(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """A copy of the tokenizer in which white space belongs to the token that holds it; byte-level ones trim it away."""

    def exact(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: False if key == "trim_offsets" else exact(item) for key, item in part.items()}
        return [exact(item) for item in part] if isinstance(part, list) else part

    document = json.loads(tokenizer.backend_tokenizer.to_str())
    document["post_processor"] = exact(document.get("post_processor"))
    document |= {"truncation": None, "padding": None}
    return Tokenizer.from_str(json.dumps(document))


def leading_tokens(encoder: Tokenizer) -> list[int]:
    """Tokens that the tokenizer puts before every text, such as one for the beginning of a document."""
    plain, full = (encoder.encode("a", add_special_tokens=added).ids for added in (False, True))
    return full[: full.index(plain[0])] if plain and plain[0] in full else []
