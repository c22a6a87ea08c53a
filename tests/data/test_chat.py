"""The tokens of a row that are trained, in the shapes of public chat templates: equal to hand-written ones."""

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from config.schema import DataSection
from data.rows.prepare_rows import RowEncoder
from data.sources.chat import Chat
from data.sources.row_formats import BadRow, Example, read_example
from tests.support.rows.chat_templates import SHAPES, THINKING, Shape

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
"""As Qwen 2.5 and Hermes write calls, between the places of generation markers."""


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
