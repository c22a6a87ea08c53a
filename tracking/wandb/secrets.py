"""Keeps what the environment holds as secrets out of everything that goes to wandb, wherever it was copied to."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tracking.environment import HIDDEN, redact

SHORTEST = 12
"""Letters that a value needs to be looked for: a shorter one may be a word that belongs where it is."""


def known_secrets(variables: Mapping[str, str]) -> list[bytes]:
    """The values of variables with a name like WANDB_API_KEY, as JSON writes them; longest first."""
    values = {value for name, value in variables.items() if len(value) >= SHORTEST and redact(name, value) == HIDDEN}
    return [json.dumps(value)[1:-1].encode() for value in sorted(values, key=len, reverse=True)]


def hide(text: bytes, secrets: list[bytes]) -> bytes:
    """A line of JSON without `secrets`."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN.encode())
    return text
