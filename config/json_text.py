"""JSON from a file that may be damaged."""

from __future__ import annotations

import json
from typing import Any


def parse(text: str | bytes) -> Any:
    """The value that `text` spells.

    Raises:
        ValueError: it is no JSON, no text, or nested so deeply that Python gives up.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
