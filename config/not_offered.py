"""Names and values that users know from other trainers: the matching key here, or why there is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from config import yaml_text


def known_elsewhere(name: str) -> str | None:
    """The key here, perhaps with its value, for a setting of another trainer; None for an unknown name."""
    plain = name.lower().replace("-", "_")
    return next((key for key, names in _table()["names"].items() if plain in names), None)


def why_not(key: str, value: str) -> str | None:
    """Why a key does not take a value that others offer; None if no reason is known."""
    reasons = _table()["values"].get(key, {})
    return next((why for pattern, why in reasons.items() if re.search(pattern, value, re.IGNORECASE)), None)


def _table() -> dict[str, Any]:
    """The table, read only after a mistake."""
    return yaml_text.parse(Path(__file__).with_name("known_elsewhere.yaml").read_text(encoding="utf-8"))
