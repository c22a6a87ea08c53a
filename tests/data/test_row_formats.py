"""Rows of every format become examples, in the shapes of public chat templates, or are named; they are packed whole."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from config.schema import DataSection
from data.rows.packing import best_fit
from data.rows.prepare_rows import RowEncoder
from data.sources.chat import Chat
from data.sources.row_formats import BadRow, Example, read_example, recognise
from data.sources.row_sources import located_rows
from data.sources.sources import open_source
from tests.support.rows.chat_templates import SHAPES, THINKING, Shape

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
    assert example.prompt.startswith("Be brief.\n\nBelow is")
    assert example.prompt.endswith("### Instruction:\nAdd\n\n### Input:\n2, 2\n\n### Response:\n")
    assert "further context" not in read_example({"instruction": "a", "output": "b"}, "alpaca", "text").prompt


def test_keys_that_arrow_added_are_taken_out_and_the_rest_stays() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": None}}]}
    row = {"messages": [{**ASKED, "tool_calls": None}, call, ANSWERED], "tools": [{"name": "f", "unit": None}]}
    row |= {"chat_template_kwargs": {"a": 1, "b": None}}
    for source in ("parquet", "hub"):
        example = read_example(row, "messages", "text", source)
        called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
        assert example == Example([ASKED, called, ANSWERED], [{"name": "f"}], {"a": 1})
        text = read_example(row | {"tools": json.dumps(row["tools"])}, "messages", "text", source)
        assert text.tools == row["tools"], "Arrow adds nothing inside a text"
    example = read_example(row, "messages", "text", "jsonl")
    assert example == Example([ASKED, call | {"content": ""}, ANSWERED], row["tools"], {"a": 1, "b": None})


def test_a_null_stays_in_jsonl_and_is_arrow_s_in_parquet(tmp_path: Path) -> None:
    tool = {"name": "f", "unit": {"default": None, "type": "string"}}
    row = {"messages": [ASKED, ANSWERED], "tools": [tool]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    tokenizer = tokenizer_of(SHAPES["chatml"].special)
    chat = Chat(tokenizer, template=CALLS.replace("BEGIN", "").replace("END", ""), train_on="assistant")
    for kind, written in (("jsonl", '"unit": {"default": null, "type'), ("parquet", '"unit": {"type')):
        data = DataSection(source=kind, path=f"{tmp_path}/rows.{kind}", format="messages", sequence_length=400)  # type: ignore[arg-type]
        found = RowEncoder(data, chat)(located_rows(data, open_source(data)))
        assert written in tokenizer.decode(found.rows[0]["tokens"]), kind


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


def test_a_row_that_does_not_fit_can_be_sent_to_a_process() -> None:
    for bad in (BadRow("prompt", "is empty"), BadRow("", "is not JSON", of_config=True)):
        sent = pickle.loads(pickle.dumps(bad))
        assert (type(sent), str(sent), sent.of_config) == (BadRow, str(bad), bad.of_config)


@given(st.lists(st.integers(1, 50), max_size=200))
def test_every_row_is_in_one_sequence_that_it_fits_into(lengths: list[int]) -> None:
    array = np.array(lengths, dtype=np.int64)
    rows, ends = best_fit(array, 50)
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    loads = [int(array[part].sum()) for part in np.split(rows, ends)[:-1]] if len(ends) else []
    assert all(0 < load <= 50 for load in loads)
    # no more than 11/9 of the fewest possible and 6/9 (Dosa 2007), of which this is a lower bound
    assert len(loads) <= 11 / 9 * max(-(-sum(lengths) // 50), sum(length > 25 for length in lengths)) + 6 / 9 + len(
        [length for length in lengths if length > 12]
    )


def test_it_is_the_best_fit_and_always_the_same() -> None:
    lengths = np.array([3, 6, 4, 7, 5, 5])
    rows, ends = best_fit(lengths, 10)
    assert [sorted(lengths[part].tolist()) for part in np.split(rows, ends)[:-1]] == [[3, 7], [4, 6], [5, 5]]
    again, _ = best_fit(lengths, 10)
    assert rows.tolist() == again.tolist()


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="rows of 1 to 11 tokens in sequences of 10"):
        best_fit(np.array([1, 11]), 10)


Turns = list[dict[str, str]]
CONVERSATIONS: dict[str, Turns] = {
    "one turn": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, you."}],
    "three turns": [
        {"role": "user", "content": "Which is larger?"},
        {"role": "assistant", "content": "9.9"},
        {"role": "user", "content": "than 9.11? grüße 🙂"},
        {"role": "assistant", "content": "Yes:\n\n9.90 > 9.11 🙂"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hi"},
    ],
    "an empty answer": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Hm"},
        {"role": "assistant", "content": ""},
    ],
    "white space": [{"role": "user", "content": " \n a "}, {"role": "assistant", "content": "\n\nb \n"}],
    "a system turn": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ],
    "a tool's answer": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "{}"},
        {"role": "tool", "content": '{"degrees": 4}'},
        {"role": "assistant", "content": "4"},
    ],
    "it ends with a question": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And?"},
    ],
}


def tokenizer_of(special: tuple[str, ...], **settings: Any) -> PreTrainedTokenizerFast:
    """One token a byte, control tokens apart; </s> ends a document."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # as Llama 3's and Qwen's are
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", *special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", **settings)


def expected(
    tokenizer: PreTrainedTokenizerFast, shape: Shape, turns: Turns, train: str
) -> tuple[list[int], list[bool]]:
    """Ids and labels by the shape's own description: what stands in each segment, token by token."""
    ids: list[int] = []
    trained: list[bool] = []
    for text, learned in shape.segments(turns, train):
        part = tokenizer(text, add_special_tokens=False).input_ids
        ids += part
        trained += [learned] * len(part)
    if shape.appended and turns[-1]["role"] == "assistant" and ids[-1] != tokenizer.eos_token_id and trained[-1]:
        ids.append(tokenizer.eos_token_id)
        trained.append(True)
    trained[0] = False
    return ids, trained


def knows(shape: Shape, turns: Turns) -> bool:
    """Whether a family has turns of these roles."""
    return all(turn["role"] in shape.before for turn in turns) and (shape.system or turns[0]["role"] != "system")


@pytest.mark.parametrize("train", ["assistant", "last_assistant"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_trained_tokens_are_those_written_down_by_hand(name: str, train: str) -> None:
    shape = SHAPES[name]
    tokenizer = tokenizer_of(shape.special)
    chat = Chat(tokenizer, template=shape.jinja, train_on=train)
    for what, turns in CONVERSATIONS.items():
        if not knows(shape, turns):
            continue
        ids, trained = expected(tokenizer, shape, turns, train)
        if not any(trained):
            continue  # an empty answer that nothing ends; below
        row = chat.tokens(Example(messages=turns))
        assert (what, tokenizer.decode(row.ids)) == (what, tokenizer.decode(ids))
        wanted = tokenizer.decode(np.array(ids)[np.array(trained)])
        assert (what, tokenizer.decode(row.ids[row.trained])) == (what, wanted)
        assert row.ids.tolist() == ids
        assert row.trained.tolist() == trained, what


@pytest.mark.parametrize("name", SHAPES)
def test_a_row_that_is_cut_has_the_labels_that_are_left(name: str) -> None:
    """Inside an answer, its control token, a question or a header: wherever it is cut, on either side."""
    shape = SHAPES[name]
    tokenizer, turns = tokenizer_of(shape.special), CONVERSATIONS["three turns"]
    ids, trained = expected(tokenizer, shape, turns, "assistant")
    chat = Chat(tokenizer, template=shape.jinja, train_on="assistant")
    ends: set[tuple[bool, bool]] = set()
    for length in range(4, len(ids) - 1, 5):
        for side, part in (("left", slice(len(ids) - length - 1, None)), ("right", slice(length + 1))):
            kept = [False, *trained[part][1:]]
            given: dict[str, Any] = {"too_long": f"truncate_{side}", "validation_fraction": 0.0}
            data = DataSection(format="messages", sequence_length=length, **given)
            found = RowEncoder(data, chat)([("rows.jsonl:1", {"messages": turns})])
            if not any(kept):
                assert not found.rows and found.counts["dropped, because cutting left no label"] == 1
                continue
            assert found.counts["truncated"] == 1 and found.longest["row"] == len(ids)
            assert found.rows[0]["tokens"].tolist() == ids[part], (side, length)
            assert found.rows[0]["trained"].tolist() == kept, (side, length)
            ends.add((kept[-1], side == "left"))
    assert ends == {(False, False), (True, False), (trained[-1], True)}


CALLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}BEGIN{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ '<tool_call>' + c['function'] | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}END{{ '\n' }}{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Calls as Qwen 2.5 and Hermes write them, between the places of generation markers."""


@pytest.mark.parametrize(("begin", "end"), [("", ""), ("{% generation %}", "{% endgeneration %}")])
def test_a_call_of_a_tool_is_trained_and_what_the_tool_says_is_not(begin: str, end: str) -> None:
    tokenizer = tokenizer_of(SHAPES["chatml"].special)
    function = {"name": "f", "arguments": {"x": 1}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "One"},
    ]
    template = "{{ lang }}" + CALLS.replace("BEGIN", begin).replace("END", end)
    chat = Chat(tokenizer, template=template, train_on="assistant")
    row = chat.tokens(Example(messages=turns, tools=[{"name": "f"}], template_options={"lang": "en"}))
    assert chat.has_markers == bool(begin)
    segments = [
        ('en<|im_start|>system\n[{"name": "f"}]<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n', 0),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>', 1),
        ("\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n", 0),
        ("One<|im_end|>", 1),
        ("\n", 0),
    ]
    parts = [tokenizer(text, add_special_tokens=False).input_ids for text, _ in segments]
    assert row.ids.tolist() == [token for part in parts for token in part]
    assert row.trained.tolist() == [bool(s[1]) for s, part in zip(segments, parts, strict=True) for _ in part]


@pytest.mark.parametrize(("tools", "named"), [(None, r"messages\[1\].tool_calls"), ([{"name": "f"}], "tools")])
def test_a_template_that_leaves_out_tools_is_refused(tools: list[Any] | None, named: str) -> None:
    chat = Chat(tokenizer_of(SHAPES["chatml"].special), template=SHAPES["chatml"].jinja, train_on="assistant")
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    example = Example(messages=[{"role": "user", "content": "Hi"}, call], tools=tools)
    for read in (chat.tokens, chat.prompt):
        with pytest.raises(BadRow, match=f"{named}: is left out by the chat template; set data.chat_template"):
            read(example)


_TURN = "{{ '<|im_start|>' + m['role'] + '\n' + CONTENT + '<|im_end|>\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_OF_TEXTS = "{% set x = m['content'] if m['content'] is string else '' %}" + _TURN.replace("CONTENT", "x")
_OF_PARTS = (
    "{% set x = namespace(all='') %}{% for part in m['content'] %}{% if part['type'] == 'text' %}"
    "{% set x.all = x.all + part['text'] | trim %}{% endif %}{% endfor %}" + _TURN.replace("CONTENT", "x.all")
)
READING_PARTS = [
    (_OF_TEXTS, "is left out"),
    (_TURN.replace("CONTENT", "m['content'] | trim"), "a list, which the chat template writes as it is"),
    (_TURN.replace("CONTENT", "m['content'] | tojson"), "a list, which the chat template writes as it is"),
    (_TURN.replace("CONTENT", "m['content'][0]['text']"), r"content\[2\]: is left out"),
    (_OF_PARTS, ""),
]


@pytest.mark.parametrize(("turn", "problem"), READING_PARTS)
def test_a_content_of_parts_is_what_the_template_reads_or_is_refused(turn: str, problem: str) -> None:
    tokenizer, template = tokenizer_of(SHAPES["chatml"].special), "{% for m in messages %}" + turn + "{% endfor %}"
    chat = Chat(tokenizer, template=template + _PROMPT, train_on="assistant")
    parts = [{"type": "text", "text": text} for text in ("Hel", " ", "lo")]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]}
    example = read_example(row, "messages", "text")
    if problem:
        for read in (chat.tokens, chat.prompt):
            with pytest.raises(BadRow, match=f"{problem}.*; write the content as one text, or set data.chat_template"):
                read(example)
        return
    found = chat.tokens(example)
    assert tokenizer.decode(found.ids[found.trained]) == "Hello<|im_end|>"
    example = read_example({"messages": [{"role": "user", "content": [*parts, {"type": "image"}]}]}, "messages", "text")
    with pytest.raises(BadRow, match=r"messages\[0\].content\[3\]: is left out"):
        chat.prompt(example)


@pytest.mark.parametrize("where", [r"messages\[0\].reasoning_content", r"messages\[0\].tool_calls", "tools"])
def test_a_control_token_in_any_text_is_refused(where: str) -> None:
    chat = Chat(tokenizer_of(SHAPES["chatml"].special), template=SHAPES["chatml"].jinja, train_on="assistant")
    spelt: list[Any] = [{"function": {"arguments": {"x": ["a <|im_end|>"]}}}]
    given: Any = "<|im_end|>" if "reasoning" in where else spelt
    message = {"role": "assistant", "content": "", where.rpartition(".")[2]: given}
    example = Example(messages=[message], tools=spelt if where == "tools" else None)
    with pytest.raises(BadRow, match=rf"^{where}: spells the control token <\|im_end\|>"):
        chat.tokens(example)


def test_turns_of_a_prompt_are_not_trained() -> None:
    """A completion is what is learned, as TRL has it, also after answers that the prompt holds."""
    tokenizer, turns = tokenizer_of(SHAPES["chatml"].special), CONVERSATIONS["three turns"]
    example = read_example({"prompt": turns[:5], "completion": turns[5:]}, "prompt_completion", "text")
    for name in ("chatml", "chatml, markers"):
        row = Chat(tokenizer, template=SHAPES[name].jinja, train_on="assistant").tokens(example)
        assert tokenizer.decode(row.ids[row.trained]) == "Hi<|im_end|>"


def test_a_template_that_renders_a_turn_differently_later_is_refused_but_for_the_last() -> None:
    tokenizer = tokenizer_of(SHAPES["chatml"].special)
    example = Example(messages=CONVERSATIONS["three turns"])
    with pytest.raises(BadRow, match=r"messages\[1\]: cannot be located.*renders the turns up to it differently"):
        Chat(tokenizer, template=THINKING, train_on="assistant").tokens(example)
    row = Chat(tokenizer, template=THINKING, train_on="last_assistant").tokens(example)
    assert tokenizer.decode(row.ids[row.trained]) == "<think>\n\n</think>\n\nHi<|im_end|>"


def test_all_tokens_and_those_of_a_completion() -> None:
    tokenizer = tokenizer_of(SHAPES["chatml"].special)
    turns = CONVERSATIONS["one turn"]
    row = Chat(tokenizer, template=SHAPES["chatml"].jinja, train_on="all").tokens(Example(messages=turns))
    assert row.trained.tolist() == [False] + [True] * (len(row.ids) - 1)
    assert tokenizer.decode(row.ids).endswith("Hello, you.<|im_end|>\n"), "the turn has its end already"
    pair = Example(prompt="a </s>", completion="b")
    row = Chat(tokenizer, template=None, train_on="assistant").tokens(pair)
    assert tokenizer.decode(row.ids[row.trained]) == "b</s>"
    assert row.ids.tolist().count(tokenizer.eos_token_id) == 1  # what spells it in a text stays text
    row = Chat(tokenizer, template=None, train_on="all").tokens(Example(completion="ab"))
    assert tokenizer.decode(row.ids[row.trained]) == "b</s>"


def test_a_token_that_the_tokenizer_puts_first_is_put_first() -> None:
    tokenizer = tokenizer_of(("<s>",))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.convert_tokens_to_ids("<s>"))]
    )
    row = Chat(tokenizer, template=None, train_on="assistant").tokens(Example(prompt="a", completion="b"))
    assert tokenizer.decode(row.ids) == "<s>ab</s>"
    assert row.trained.tolist() == [False, False, True, True]
