"""Chat templates in the shapes that public models use, and what each makes of a conversation, written down by hand.

A shape says how a turn of each role looks: what stands before its content, what ends it (which an answer learns), and
what follows (which it does not). The Jinja beside it is written in the style of that family's own.
"""

from dataclasses import dataclass, field
from typing import Any

Segments = list[tuple[str, bool]]
"""Text, and whether it is trained."""


@dataclass(frozen=True)
class Shape:
    """One family's template."""

    jinja: str
    before: dict[str, str]
    end: str
    """The end of an answer: trained."""
    after: str = ""
    """The text that follows an answer: not trained."""
    other_end: dict[str, str] = field(default_factory=dict)
    """The end of turns of other roles where it is not `end` + `after`."""
    opening: str = ""
    strip: bool = False
    special: tuple[str, ...] = ()
    system: bool = True
    """Whether it has system turns."""
    lead: str = ""
    """Between the prompt to generate and an answer's content: trained."""
    only_between: bool = False
    """Whether the text that follows a turn is missing after the last one."""
    appended: bool = False
    """Whether the end of the document is appended, since the template ends its answers with no control token."""

    def segments(self, messages: list[dict[str, str]], train: str = "assistant") -> Segments:
        """The conversation as this family writes it. train: assistant or last_assistant."""
        found: Segments = [(self.opening, False)]
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        trained = answers if train == "assistant" else answers[-1:]
        for index, message in enumerate(messages):
            role, content = message["role"], message["content"].strip() if self.strip else message["content"]
            last = self.only_between and index + 1 == len(messages)
            if role == "assistant":
                learned, after = index in trained, "" if last else self.after
                answer = self.lead + content + self.end
                found += [(self.before[role], False), (answer, learned), (after, False)]
            else:
                end = "" if last else self.other_end.get(role, self.end + self.after)
                found += [(self.before[role] + content + end, False)]
        return found


def _roles(pattern: str, **names: str) -> dict[str, str]:
    named = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool", **names}
    return {role: pattern.format(name) for role, name in named.items()}


_LOOP = "{% for message in messages %}"
_CHATML = "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
_CHATML_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_HEADER = "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
_HEADER_PROMPT = "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
IM = ("<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

_IM_TURNS = (_roles("<|im_start|>{}\n"), "<|im_end|>", "\n")
_LLAMA3: dict[str, Any] = {"before": _roles("<|start_header_id|>{}<|end_header_id|>\n\n"), "end": "<|eot_id|>"}
_LLAMA3 |= {"opening": "<|begin_of_text|>", "strip": True, "special": LLAMA3}

SHAPES: dict[str, Shape] = {
    "chatml": Shape(_LOOP + _CHATML + _CHATML_PROMPT, *_IM_TURNS, special=IM),
    "chatml, default system": Shape(
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
        + _LOOP
        + _CHATML
        + _CHATML_PROMPT,
        *_IM_TURNS,
        opening="<|im_start|>system\nBe brief.<|im_end|>\n",
        special=IM,
        system=False,
    ),
    "chatml, markers": Shape(
        _LOOP + "{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
        "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        + _CHATML_PROMPT,
        *_IM_TURNS,
        special=IM,
    ),
    "chatml, markers without the end": Shape(
        _LOOP + "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
        "{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}" + _CHATML_PROMPT,
        *_IM_TURNS,
        special=IM,
    ),
    "llama 3": Shape(
        "{{ '<|begin_of_text|>' }}"
        + _LOOP
        + _HEADER
        + "{{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        + _HEADER_PROMPT,
        **_LLAMA3,
    ),
    "llama 2": Shape(
        "{{ '<s>' }}" + _LOOP + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}"
        "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}",
        {"user": "[INST] ", "assistant": " "},
        " </s>",
        other_end={"user": " [/INST]"},
        opening="<s>",
        special=("<s>",),
        system=False,
    ),
    "gemma": Shape(
        "{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + _LOOP
        + "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        _roles("<start_of_turn>{}\n", assistant="model"),
        "<end_of_turn>",
        "\n",
        opening="<bos>",
        strip=True,
        special=("<bos>", "<start_of_turn>", "<end_of_turn>"),
        system=False,
    ),
    "zephyr": Shape(
        _LOOP + "{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        _roles("<|{}|>\n"),
        "</s>",
        "\n",
    ),
    "olmo 2": Shape(
        "{{ '<s>' }}" + _LOOP + "{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% if not loop.last %}{{ '\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '\n<|assistant|>\n' }}{% endif %}",
        {"system": "<|system|>\n", "user": "<|user|>\n", "assistant": "<|assistant|>\n"},
        "</s>",
        "\n",
        other_end={"system": "\n", "user": "\n"},
        only_between=True,
        opening="<s>",
        special=("<s>",),
    ),
    "vicuna, no prompt to generate": Shape(
        _LOOP + "{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
        "{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}",
        {"user": "USER: ", "assistant": "ASSISTANT: "},
        "</s>",
        other_end={"user": " "},
        system=False,
    ),
    "deepseek": Shape(
        "{{ '<s>' }}" + _LOOP + "{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}"
        "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}"
        "{% else %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
        {"system": "", "user": "User: ", "assistant": "Assistant:"},
        "</s>",
        lead=" ",
        other_end={"system": "\n\n", "user": "\n\n"},
        opening="<s>",
        special=("<s>",),
    ),
    "solar": Shape(
        _LOOP + "{% set who = {'user': 'User', 'assistant': 'Assistant', 'system': 'System'} %}"
        "{{ '### ' + who[message['role']] + ':\n' + message['content'] + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}",
        {"user": "### User:\n", "assistant": "### Assistant:\n", "system": "### System:\n"},
        "\n\n",
        appended=True,
    ),
    "falcon": Shape(
        _LOOP + "{% if not loop.first %}{{ '\n' }}{% endif %}"
        "{{ message['role'] | title + ': ' + message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\nAssistant: ' }}{% endif %}",
        {"system": "System: ", "user": "User: ", "assistant": "Assistant: "},
        "",
        "\n",
        other_end={"system": "\n", "user": "\n"},
        only_between=True,
        appended=True,
    ),
}
"""End of document: </s>."""

THINKING = (
    _LOOP + "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ message['content'] + '<|im_end|>\n' }}{% endfor %}" + _CHATML_PROMPT
)
"""Qwen 3's way: only the last answer has an empty thought, so earlier ones cannot be located by rendering."""
