"""Rows of every format become examples; what does not fit is named by its field."""

from typing import Any

import pytest

from data.sources.row_formats import BadRow, read_example, recognise

ASKED = {"role": "user", "content": "2+2?"}
ANSWERED = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"messages": [ASKED, ANSWERED]}, "messages"),
        ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}, "sharegpt"),
        ({"conversations": [ASKED, ANSWERED]}, "sharegpt"),
        ({"instruction": "2+2?", "output": "4"}, "alpaca"),
        ({"instruction": "2+2?", "input": "", "output": "4", "text": "all of it"}, "alpaca"),
        ({"prompt": [ASKED], "completion": [ANSWERED]}, "prompt_completion"),
    ],
)
def test_a_format_is_recognised_and_read(row: dict[str, Any], format: str) -> None:
    assert recognise(row, "text") == format
    assert read_example(row, format, "text").messages == [ASKED, ANSWERED]


@pytest.mark.parametrize("role", ["developer", "function", "ipython", "tool", "tools", "observation", "critic"])
def test_roles_of_a_template_of_its_own_are_left_to_it(role: str) -> None:
    turns = [ASKED, {"role": role, "content": "a"}, ANSWERED]
    assert read_example({"messages": turns}, "messages", "text").messages == turns


def test_plain_texts() -> None:
    assert recognise({"prompt": "a", "completion": "b", "id": 1}, "text") == "prompt_completion"
    pair = read_example({"prompt": "a", "completion": "b"}, "prompt_completion", "text")
    assert (pair.messages, pair.prompt, pair.completion) == (None, "a", "b")
    assert recognise({"body": "a"}, "body") == "text"
    assert read_example({"body": "a"}, "text", "body").completion == "a"


def test_alpaca_has_a_system_turn_an_input_and_a_prompt_for_tokenizers_without_template() -> None:
    row = {"instruction": "Add", "input": "2, 2", "output": "4", "system": "Be brief."}
    example = read_example(row, "alpaca", "text")
    assert example.messages is not None
    assert [message["content"] for message in example.messages] == ["Be brief.", "Add\n\n2, 2", "4"]
    assert example.prompt.endswith("### Instruction:\nAdd\n\n### Input:\n2, 2\n\n### Response:\n")
    assert "further context" not in read_example({"instruction": "a", "output": "b"}, "alpaca", "text").prompt


def test_keys_that_arrow_added_are_taken_out_and_the_rest_stays() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": None}}]}
    row = {"messages": [{**ASKED, "tool_calls": None}, call, ANSWERED], "tools": '[{"name": "f"}]'}
    example = read_example(row | {"chat_template_kwargs": {"a": 1, "b": None}}, "messages", "text")
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    assert example.messages == [ASKED, called, ANSWERED]
    assert example.tools == [{"name": "f"}]
    assert example.template_options == {"a": 1}


BAD = [
    ({"messages": "hi"}, "messages", "messages: is text, not a list"),
    ({"messages": []}, "messages", "messages: is an empty list"),
    ({"message": [ASKED]}, "messages", "messages: is missing or null, not a list"),
    ({"messages": ["hi"]}, "messages", r"messages\[0\]: is text, not an object with role and content"),
    ({"messages": [ASKED, {"content": "4"}]}, "messages", r"messages\[1\].role: is missing or null, not text"),
    ({"messages": [ASKED, {"role": 1, "content": "4"}]}, "messages", r"messages\[1\].role: is a number"),
    ({"messages": [ASKED, {"role": "assistant"}]}, "messages", r"messages\[1\].content: is missing or null"),
    ({"messages": [ASKED, {"role": "assistant", "content": 4}]}, "messages", r"messages\[1\].content: is a number"),
    *(
        (
            {"messages": [ASKED, {"role": role, "content": "4"}, *more]},
            "messages",
            rf"messages\[1\].role: is '{role}'; did",
        )
        for role in ("asistant", "Assistant", "gpt", "bot", "model", "usr", "human")
        for more in ([], [ASKED, ANSWERED])
    ),
    ({"messages": [ASKED], "tools": "{"}, "messages", "tools: is text that is not JSON"),
    ({"messages": [ASKED], "tools": {}}, "messages", "tools: is an object, not a list of JSON schemas"),
    ({"messages": [ASKED], "chat_template_kwargs": []}, "messages", "chat_template_kwargs: is a list, not an object"),
    ({"conversations": [{"from": "bot", "value": "x"}]}, "sharegpt", r"conversations\[0\].from: is 'bot', not one of"),
    ({"conversations": [{"from": "gpt"}]}, "sharegpt", r"conversations\[0\].value: is missing or null, not text"),
    ({"conversations": [1]}, "sharegpt", r"conversations\[0\]: is a number, not an object"),
    ({"instruction": "a"}, "alpaca", "output: is missing or null, not text"),
    ({"instruction": "", "output": "a"}, "alpaca", "instruction: is empty"),
    ({"instruction": "a", "output": "b", "system": 1}, "alpaca", "system: is a number, not text"),
    ({"prompt": "a"}, "prompt_completion", "completion: is missing or null, not text"),
    ({"prompt": [ASKED], "completion": "b"}, "prompt_completion", "completion: is text and prompt is a list"),
    ({"prompt": [ASKED], "completion": [ASKED]}, "prompt_completion", r"completion\[0\].role: is 'user'"),
    ({"prompt": "a", "completion": ""}, "prompt_completion", "completion: is empty"),
    ({"text": None}, "text", "text: is missing or null, not text"),
]


@pytest.mark.parametrize(("row", "format", "problem"), BAD)
def test_what_does_not_fit_is_named_by_its_field(row: dict[str, Any], format: str, problem: str) -> None:
    with pytest.raises(BadRow, match=f"^{problem}"):
        read_example(row, format, "text")
