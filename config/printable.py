"""Text of others, such as names, errors and notes, as text that a terminal or a page shows and does not obey.

Control characters, terminal escapes and marks that reorder or hide what is beside them become visible escapes: a name
with an escape sequence in it is shown as `\\x1b[31m`, in no other colour.
"""

from __future__ import annotations

import re

from config.redact import Redactor

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_BREAKS = re.compile("[\t\n\x0b\x0c\r\x1c-\x1e\x85\u2028\u2029]+")


def printable(text: str) -> str:
    """`text` with control characters and invisible marks as escapes; line breaks and tabs stay."""
    return text if text.isascii() and text.isprintable() else _OBEYED.sub(_escaped, text)


def line(text: str) -> str:
    """`printable` on a single line: a line break becomes a space."""
    return printable(_BREAKS.sub(" ", text))


def shown(value: object) -> str:
    """Any value as one line of text for a terminal, a page or a log: without secrets, and nothing in it is obeyed."""
    return line(Redactor().text(str(value)))


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
