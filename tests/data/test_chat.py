"""Which tokens of a row are trained: for 21 shapes of chat templates, equal to what was written down by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from data.chat import Chat
from data.row_formats import BadRow, Example
from tests.support.chat_templates import SHAPES, THINKING, Shape

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


@pytest.mark.parametrize("train", ["assistant", "last_assistant"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_trained_tokens_are_those_written_down_by_hand(name: str, train: str) -> None:
    shape = SHAPES[name]
    tokenizer = tokenizer_of(shape.special)
    chat = Chat(tokenizer, template=shape.jinja, train_on=train)
    for what, turns in CONVERSATIONS.items():
        if turns[0]["role"] == "system" and not shape.system:
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


def test_tools_and_further_variables_reach_the_template() -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}{{ lang }}" + SHAPES["chatml"].jinja
    tokenizer = tokenizer_of(SHAPES["chatml"].special)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    turns = [{"role": "user", "content": "Hi"}, call, {"role": "tool", "content": "1"}]
    turns.append({"role": "assistant", "content": "One"})
    example = Example(messages=turns, tools=[{"name": "f"}], template_options={"lang": "en"})
    row = Chat(tokenizer, template=template, train_on="assistant").tokens(example)
    assert str(tokenizer.decode(row.ids)).startswith('[{"name": "f"}]en<|im_start|>user')
    assert tokenizer.decode(row.ids[row.trained]) == "<|im_end|>One<|im_end|>"


def test_a_template_that_renders_a_turn_differently_later_is_refused_but_for_the_last() -> None:
    tokenizer = tokenizer_of(SHAPES["chatml"].special)
    example = Example(messages=CONVERSATIONS["three turns"])
    with pytest.raises(BadRow, match=r"messages\[1\]: cannot be located.*renders the turns up to it differently"):
        Chat(tokenizer, template=THINKING, train_on="assistant").tokens(example)
    row = Chat(tokenizer, template=THINKING, train_on="last_assistant").tokens(example)
    assert tokenizer.decode(row.ids[row.trained]) == "<think>\n\n</think>\n\nHi<|im_end|>"


def test_content_that_spells_a_control_token_is_refused() -> None:
    chat = Chat(tokenizer_of(SHAPES["chatml"].special), template=SHAPES["chatml"].jinja, train_on="assistant")
    turns = [{"role": "user", "content": "a<|im_end|>b"}, {"role": "assistant", "content": "c"}]
    with pytest.raises(BadRow, match=r"messages\[0\].content: spells the control token <\|im_end\|>"):
        chat.tokens(Example(messages=turns))


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


def test_a_conversation_without_a_template_or_an_answer_is_refused() -> None:
    tokenizer = tokenizer_of(())
    with pytest.raises(BadRow, match="no chat template; set data.chat_template"):
        Chat(tokenizer, template=None, train_on="assistant").tokens(Example(messages=CONVERSATIONS["one turn"]))
    question = Example(messages=CONVERSATIONS["one turn"][:1])
    with pytest.raises(BadRow, match="has no assistant's turn to train on"):
        Chat(tokenizer, template=SHAPES["zephyr"].jinja, train_on="assistant").tokens(question)
