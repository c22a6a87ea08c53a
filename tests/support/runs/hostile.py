"""Texts that a name, a note or an error may hold and that no artefact may obey; and secrets that none may show."""

import re

ESCAPE, RIGHT_TO_LEFT = "\x1b[31mred\x1b[0m\x07", "\u202egnp.exe\u2066"

HOSTILE = {
    "script": "</script><script>alert(1)</script>",
    "image": "<img src=x onerror=alert(1)>",
    "attribute": "\" onmouseover='alert(1)",
    "comment": "<!-- <script>",
    "entity": "&lt;b&gt; &#124;",
    "table": "a | b || c\\| d",
    "code": "``` `code` ````",
    "markdown": "[link](http://evil.test) **bold** ![x](y) # head",
    "lines": "first\nsecond\r\n| x | y |\n---\n# head\n- item",
    "rich": "[bold red]x[/bold red] [/oops] :smile:",
    "escape": ESCAPE,
    "bidirectional": RIGHT_TO_LEFT,
    "separator": "one\u2028two\x85three\x0bfour",
    "mathematics": "$\\frac{a}$ and b",
    "template": "@DATA@ %{y} {0} %s ${HOME} $(id)",
}

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that a terminal or a page would obey; line breaks and tabs are the writers' own."""

SECRETS = {
    "hugging face": "hf_" + "aBcDeFgHiJ" * 3 + "kLmN",
    "wandb": "0123456789abcdef" * 2 + "01234567",
    "openai": "sk-proj-" + "a1B2c3D4" * 5,
    "github": "ghp_" + "x1Y2z3" * 6,
    "aws": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "aws id": "AKIA" + "IOSFODNN7EXAMPLE",
    "password": "c0rrect-Horse!battery9",
}
"""Made up, of the formats of real ones."""
