"""What comes from a run, as text on an HTML page or as data in its script: never markup, never a secret."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from config.printable import printable, shown
from config.redact import redact


def text(value: object) -> str:
    """Any value as text of one line, in an element or in a quoted attribute."""
    return escape(shown(value))


def script_json(value: Any) -> str:
    """Plain values as JSON that ends no <script>, opens no comment in it, and holds nothing that a page would obey."""
    content = json.dumps(_printable(redact(value)), allow_nan=False, separators=(",", ":"))
    return content.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(name)): _printable(item) for name, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list | tuple) else value
