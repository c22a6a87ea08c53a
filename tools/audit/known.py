"""The known defects of known.yaml, and which of them a run hits.

A condition is a value, a list of which any may be, or text that opens with >, <, >=, <= or !=.
"""

from __future__ import annotations

import operator
import re
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from config import yaml_text
from tools.audit.given import ABSENT, Given

SEVERITIES = ("stops", "wrong", "risk", "note")
"""In order. stops, wrong: whoever hits it does not train, or trains wrongly. risk: wrong under a condition that no
config shows, or a race. note: right but for what it says."""
BAD = SEVERITIES[:2]
_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "!=": operator.ne}
_COMPARISON = re.compile(r"(>=|<=|!=|>|<) *(\S+)$")


def read_known() -> list[dict[str, Any]]:
    """The entries, most severe first."""
    entries = yaml_text.parse(Path(__file__).with_name("known.yaml").read_text(encoding="utf-8"))
    return sorted(entries, key=lambda entry: SEVERITIES.index(entry["severity"]))


def holds(wanted: Any, value: Any) -> bool | None:
    """Whether a condition holds for a fact; None where the fact is not known."""
    if value is None:
        return None
    if isinstance(wanted, list):
        return any(holds(one, value) for one in wanted)
    comparison = _COMPARISON.match(wanted) if isinstance(wanted, str) else None
    if comparison is None:
        return bool(value == wanted)
    number = isinstance(value, int | float)
    return value != ABSENT and number and bool(_OPERATORS[comparison[1]](value, float(comparison[2])))


def find(entry: dict[str, Any], given: Given) -> dict[str, Any] | None:
    """The entry for a report, with `why` it is not certain ("": it is); None where it does not apply."""
    open_ = []
    for package, versions in entry.get("versions", {}).items():
        version = given.versions[package]
        if version is None:
            open_.append(f"{package} is {versions} (give --with {package}=VERSION)")
        elif not SpecifierSet(versions).contains(version, prereleases=True):
            return None
    for name, wanted in entry["when"].items():
        answer = holds(wanted, given.fact(name))
        if answer is False:
            return None
        if answer is None:
            text = " or ".join(map(str, wanted)) if isinstance(wanted, list) else str(wanted)
            open_.append(f"{name.replace('_', ' ')} is {text.lower()}")
    tried, version = entry.get("tried"), given.versions["deepspeed"]
    why = "if " + " and ".join(open_) if open_ else ""
    if not why and tried and version and not Version(tried[0]) <= Version(version) <= Version(tried[-1]):
        why = f"measured with DeepSpeed {' to '.join(tried)}, not with {version}"
    kept = {name: entry.get(name) for name in ("id", "severity", "says", "measured", "thread", "instead")}
    return {**kept, "why": why}
