"""The formats in which rows for fine-tuning come (docs/data.md), and the common form they are converted to.

A row that does not fit is a `BadRow` that names the field. Whoever reads the rows knows the file and the line.
"""

from __future__ import annotations

import difflib
import json
import os.path
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Messages = list[dict[str, Any]]


class BadRow(ValueError):
    """A row that does not fit its format: the field, and what is wrong with it."""

    def __init__(self, where: str, problem: str, *, of_config: bool = False) -> None:
        """of_config: the config, not the row, is wrong; `problem` says what to set there."""
        super().__init__(where, problem)  # as given: worker processes get it pickled
        self.of_config = of_config

    def __str__(self) -> str:
        return ": ".join(filter(None, self.args))


Found = tuple[str, dict[str, Any] | BadRow]
"""The place of a row, and the row, or the reason why it is not one."""


@dataclass(frozen=True)
class Example:
    """One row in the common form: messages for a chat template, or two texts of which the second is the answer."""

    messages: Messages | None = None
    tools: list[Any] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    """More variables for the chat template, from the row's `chat_template_kwargs`."""
    prompt: str = ""
    completion: str = ""
    context: int = 0
    """[messages] This many at the start are not answers, whatever their role."""


def recognise(row: Mapping[str, Any], text_field: str) -> str:
    """The format of a row with these fields. Raises BadRow naming the fields it has."""
    there = {name for name, value in row.items() if value is not None}
    for name, needed in _FIELDS.items():
        if needed <= there:
            return name
    if text_field in there:
        return "text"
    known = ", ".join("+".join(sorted(needed)) for needed in _FIELDS.values())
    fields = ", ".join(name if name in there else f"{name} (null)" for name in sorted(row)) or "none"
    raise BadRow("", f"has no known format: its fields are {fields}; known are {known} and {text_field} (text)")


def read_example(row: Mapping[str, Any], format: str, text_field: str, source: str = "jsonl") -> Example:
    """A row in its common form. format: not auto. source: data.source, which says what a null means. Raises BadRow."""
    row = _written(row, source)
    if format == "text":
        return Example(completion=text_of(row, text_field))
    return _READERS[format](row)


def read_examples(row: Mapping[str, Any], format: str, text_field: str, source: str = "jsonl") -> tuple[Example, ...]:
    """The sequences that a row becomes: one, or the two of a pair, chosen first. Raises BadRow."""
    if format == "preference":
        return _pair(_written(row, source))
    return (read_example(row, format, text_field, source),)


_FIELDS = {
    "messages": {"messages"},
    "sharegpt": {"conversations"},
    "prompt_completion": {"prompt", "completion"},
    "alpaca": {"instruction", "output"},
    "preference": {"chosen", "rejected"},
}

_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}

_QUESTIONS = ("question", "instruction", "query", "input")
"""Other names for the prompt in public data sets of pairs."""
_ROLES = ("system", "user", "assistant")
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "ai": "assistant", "model": "assistant"}
"""Role names in other row formats. A template would show them to the model as they are, or leave them out."""

ALPACA_PROMPT = (
    "Below is an instruction that describes a task{also}. Write a response that appropriately completes the \
request.\n\n### Instruction:\n{instruction}\n\n{given}### Response:\n"
)
"""The prompt that Stanford Alpaca was trained with (Taori et al. 2023), for tokenizers without a chat template."""


def alpaca_prompt(instruction: str, given: str) -> str:
    """The prompt text of a row if there is no chat template."""
    also = ", paired with an input that provides further context" if given else ""
    return ALPACA_PROMPT.format(also=also, instruction=instruction, given=f"### Input:\n{given}\n\n" if given else "")


def _messages(row: Mapping[str, Any]) -> Example:
    return Example(messages=_conversation(row, "messages"), **_beside(row))


def _sharegpt(row: Mapping[str, Any]) -> Example:
    turns = list_of(row, "conversations")
    if turns and all(isinstance(turn, dict) and "role" in turn for turn in turns):
        return Example(messages=_conversation(row, "conversations"), **_beside(row))
    messages: Messages = []
    for index, turn in enumerate(turns):
        where = f"conversations[{index}]"
        if not isinstance(turn, dict):
            raise BadRow(where, f"is {json_kind(turn)}, not an object with from and value")
        speaker = turn.get("from")
        if speaker not in _SHAREGPT_ROLES:
            raise BadRow(f"{where}.from", f"is {speaker!r}, not one of {', '.join(_SHAREGPT_ROLES)}")
        if not isinstance(turn.get("value"), str):
            raise BadRow(f"{where}.value", f"is {json_kind(turn.get('value'))}, not text")
        messages.append({"role": _SHAREGPT_ROLES[speaker], "content": turn["value"]})
    return Example(messages=_with_system(row, messages, "conversations"), **_beside(row))


def _alpaca(row: Mapping[str, Any]) -> Example:
    instruction, output = text_of(row, "instruction"), text_of(row, "output", may_be_empty=True)
    given = text_of(row, "input", may_be_empty=True) if row.get("input") is not None else ""
    question = f"{instruction}\n\n{given}" if given else instruction
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
    turns = _with_system(row, messages, "instruction")
    before = "".join(f"{turn['content']}\n\n" for turn in turns[:-2])
    return Example(messages=turns, prompt=before + alpaca_prompt(instruction, given), completion=output)


def _prompt_completion(row: Mapping[str, Any]) -> Example:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) != isinstance(completion, list):
        raise BadRow("completion", f"is {json_kind(completion)} and prompt is {json_kind(prompt)}; give both alike")
    if isinstance(prompt, list):
        answer = _conversation(row, "completion")
        if any(message["role"] != "assistant" for message in answer[:1]):
            raise BadRow(
                "completion[0].role", f"is {answer[0]['role']!r}; a completion starts with the assistant's turn"
            )
        prompt = _conversation(row, "prompt")
        return Example(messages=prompt + answer, context=len(prompt), **_beside(row))
    return Example(prompt=text_of(row, "prompt", may_be_empty=True), completion=text_of(row, "completion"))


_READERS: dict[str, Callable[[Mapping[str, Any]], Example]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
}


def _pair(row: Mapping[str, Any]) -> tuple[Example, Example]:
    """The chosen and the rejected answer, each with the shared prompt."""
    chosen, rejected, prompt = row.get("chosen"), row.get("rejected"), row.get("prompt")
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise BadRow("rejected", f"is {json_kind(rejected)} and chosen is {json_kind(chosen)}; give both alike")
    if isinstance(chosen, list):
        asked, answers = _conversations_of_pair(row)
    else:
        texts = [text_of(row, "chosen"), text_of(row, "rejected")]
        asked = _conversation(row, "prompt") if isinstance(prompt, list) else []
        answers = [[{"role": "assistant", "content": text}] for text in texts]
    if chosen == rejected:
        raise BadRow("rejected", "is the same as chosen, so there is nothing to prefer")
    if asked:
        both = [Example([*asked, *answer], context=len(asked), **_beside(row)) for answer in answers]
        return both[0], both[1]
    shared = _shared_question(row, *texts) if prompt is None else ""
    before = shared if prompt is None else text_of(row, "prompt", may_be_empty=True)
    first, second = (text[len(shared) :] for text in texts)
    return Example(prompt=before, completion=first), Example(prompt=before, completion=second)


def _conversations_of_pair(row: Mapping[str, Any]) -> tuple[Messages, list[Messages]]:
    """The prompt of two message lists, from its column or their common beginning, and the rest of each list."""
    lists, prompt = [_conversation(row, "chosen"), _conversation(row, "rejected")], row.get("prompt")
    shared = next((n for n, (a, b) in enumerate(zip(*lists, strict=False)) if a != b), min(map(len, lists)))
    if isinstance(prompt, list):
        asked = _conversation(row, "prompt")
        first = len(asked) if all(turns[: len(asked)] == asked for turns in lists) else 0
    elif prompt is None or prompt in [turn["content"] for turn in lists[0][:shared]]:
        asked, first = lists[0][:shared], shared
    else:
        asked, first = [{"role": "user", "content": text_of(row, "prompt")}], 0
    if not asked:
        raise BadRow("prompt", "is missing, and chosen and rejected do not begin with the same turns")
    answers = [turns[first:] for turns in lists]
    for name, turns in zip(("chosen", "rejected"), answers, strict=True):
        if not turns and lists[0] != lists[1]:
            raise BadRow(name, "has no turn after the prompt")
        if turns and turns[0]["role"] != "assistant":
            problem = f"is {turns[0]['role']!r}; an answer starts with the assistant's turn"
            raise BadRow(f"{name}[{first}].role", problem)
    return asked, answers


def _shared_question(row: Mapping[str, Any], first: str, second: str) -> str:
    """The common beginning of two texts, which is their question. Raises BadRow if it is elsewhere or missing."""
    other = next((name for name in _QUESTIONS if isinstance(row.get(name), str)), None)
    if other is not None:
        raise BadRow("prompt", f"is missing, and {other} would not be read; rename it to prompt, or remove it")
    shared = os.path.commonprefix([first, second])
    while shared and not shared[-1].isspace():  # back to the start of a word
        shared = shared[:-1]
    shared = shared.rstrip()
    if not shared:
        problem = "is missing, and chosen and rejected do not begin with the same words; give a prompt, or an empty one"
        raise BadRow("prompt", f"{problem}. The row's fields are {', '.join(sorted(row))}")
    return shared


def _conversation(row: Mapping[str, Any], name: str) -> Messages:
    """A list of messages with a role and content each; other keys, such as tool_calls, are kept as they are."""
    found: Messages = []
    for index, message in enumerate(list_of(row, name)):
        where = f"{name}[{index}]"
        if not isinstance(message, dict):
            raise BadRow(where, f"is {json_kind(message)}, not an object with role and content")
        message = {key: value for key, value in message.items() if value is not None}
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise BadRow(f"{where}.role", f"is {json_kind(role)}, not text such as user or assistant")
        meant = _meant(role)
        if meant is not None:
            raise BadRow(f"{where}.role", f"is {role!r}; did you mean {meant}?")
        parts = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
        if not isinstance(content, str) and not parts and not (content is None and message.get("tool_calls")):
            raise BadRow(f"{where}.content", f"is {json_kind(content)}, not text")
        found.append(message if content else {**message, "content": ""})
    return found


def _meant(role: str) -> str | None:
    """The role meant by a misspelled one or one of another format, which a template would show unchanged."""
    if role in _ROLES:
        return None
    plain = role.strip().lower()
    near = difflib.get_close_matches(plain, _ROLES, n=1, cutoff=0.8)
    return _OTHER_NAMES.get(plain) or (near[0] if near else None)


def _beside(row: Mapping[str, Any]) -> dict[str, Any]:
    """Tools and template options that a row may have beside its messages."""
    tools, options = row.get("tools"), row.get("chat_template_kwargs")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BadRow("tools", f"is text that is not JSON ({error})") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRow("tools", f"is {json_kind(tools)}, not a list of JSON schemas")
    if options is not None and not isinstance(options, dict):
        raise BadRow("chat_template_kwargs", f"is {json_kind(options)}, not an object")
    return {"tools": tools or None, "template_options": options or {}}


def _with_system(row: Mapping[str, Any], messages: Messages, name: str) -> Messages:
    system = row.get("system")
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise BadRow("system", f"is {json_kind(system)}, not text")
    if messages and messages[0]["role"] == "system":
        raise BadRow("system", f"is set, and {name} also opens with a system turn; remove one of them")
    return [{"role": "system", "content": system}, *messages]


def list_of(row: Mapping[str, Any], name: str) -> list[Any]:
    """A field that is a non-empty list. Raises BadRow."""
    value = row.get(name)
    if not isinstance(value, list):
        raise _other_type(row, name, "a list")
    if not value:
        raise BadRow(name, "is an empty list")
    return value


def text_of(row: Mapping[str, Any], name: str, *, may_be_empty: bool = False) -> str:
    """A text field. Raises BadRow."""
    value = row.get(name)
    if not isinstance(value, str):
        raise _other_type(row, name, "text")
    if not value and not may_be_empty:
        raise BadRow(name, "is empty")
    return value


def _other_type(row: Mapping[str, Any], name: str, wanted: str) -> BadRow:
    value = row.get(name)
    fields = f"; the row's fields are {', '.join(sorted(row)) or 'none'}" if value is None else ""
    return BadRow(name, f"is {json_kind(value)}, not {wanted}{fields}")


def _written(value: Any, source: str) -> Any:
    """`value` without the keys that are null, where these are Arrow's, which gives every object the keys of all."""
    if source not in ("parquet", "hub"):
        return value
    if isinstance(value, dict):
        return {key: _written(item, source) for key, item in value.items() if item is not None}
    return [_written(item, source) for item in value] if isinstance(value, list) else value


def json_kind(value: Any) -> str:
    """The name of a JSON value's type, for messages."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return "missing or null" if value is None else names.get(type(value), type(value).__name__)
