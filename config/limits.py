"""Fields of the run config's sections that carry the range `config.load` holds a value to."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any


def limit(
    default: Any = MISSING,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field with a default and a range that `config.load` checks (bounds as in the names)."""
    bounds = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    metadata = {name: bound for name, bound in bounds.items() if bound is not None}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)
