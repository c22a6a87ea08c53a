"""Describe the dtypes observed inside a step, from a `precision` event (written by `precision/inner_dtypes.py`)."""

from typing import Any

NAMED = 3
"""Maximum number of modules named in a line."""


def lower_than_promised(event: dict[str, Any]) -> list[str]:
    """One line per operation computed in a lower dtype than promised, with its modules; empty in a sound run."""
    return [
        f"{entry['what']} in {entry['computed']} where {entry['promised']} is promised: {_some(entry['modules'])}"
        for entry in _part(event, "lower", list)
    ]


def computed(event: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Operation to dtype to number of modules."""
    found: dict[str, dict[str, int]] = _part(event, "computed", dict)
    return found


def unobserved(event: dict[str, Any]) -> list[tuple[str, str]]:
    """(operation, why it could not be observed and in which modules) pairs."""
    found = []
    for entry in _part(event, "unobserved", list):
        names = f" ({_some(entry['modules'])})" if entry["modules"] else ""
        found.append((entry["what"], f"not observable{names}: {entry['why']}"))
    return found


def _part(event: dict[str, Any], name: str, kind: type) -> Any:
    """A part of `inner`; empty for older events, which lack it."""
    inner = event.get("inner")
    part = inner.get(name) if isinstance(inner, dict) else None
    return part if isinstance(part, kind) else kind()


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(map(str, names[:NAMED])) + more
