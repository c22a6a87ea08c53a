"""JSON sealed with its own hash, so that changes are detected."""

import hashlib
import json
from typing import Any

from config import json_text


def sealed(content: dict[str, Any]) -> str:
    """The text of a sealed file: `content` and, last, the SHA-256 of its canonical JSON."""
    return json.dumps({**content, "sha256": _seal(content)}, indent=1) + "\n"


def unsealed(text: bytes) -> tuple[dict[str, Any], bool]:
    """The content of a sealed file, and whether the seal matches. Raises ValueError for other files."""
    try:
        content = json_text.parse(text)
        seal = content.pop("sha256")
        return content, bool(seal == _seal(content))
    except (KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError("is no sealed JSON object") from None


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
