"""Makes foreign text, such as names, errors and notes, safe to show in a terminal or on a page.

Control characters, terminal escapes and marks that reorder or hide their neighbours become visible escapes: an escape
sequence in a name is shown as `\\x1b[31m` and changes no colour.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

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
    """Any value as one line of text for a terminal, a page or a log, without secrets or active control characters."""
    return line(Redactor().text(str(value)))


def tell(text: object, who: str = "mantissa") -> None:
    """Print one line for the user, `shown`, to standard error. who: says it."""
    print(f"{who}: {shown(text)}", file=sys.stderr, flush=True)


def first_of(names: Sequence[str], most: int) -> str:
    """The first `most` names, separated by commas, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
