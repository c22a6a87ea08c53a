"""The doctor's findings: lines with a level and a fix, as text or JSON."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TextIO

from config.printable import shown

Facts = dict[str, Any]
"""Facts about a machine, or a program's answer from it."""
GREEN, AMBER, RED = "green", "amber", "red"
_COLOURS = {RED: "31", AMBER: "33", GREEN: "32"}
"""Level to the colour of its lines, from the worst on."""
_RANK = {level: rank for rank, level in enumerate(_COLOURS)}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: str
    """red: a job fails or computes wrong numbers. amber: it may fail, or is slow. green: checked and fine."""
    check: str
    """Subject of the check, such as `c++ compiler`."""
    what: str
    """Result, with the numbers."""
    fix: str = ""
    """Advice; empty if green."""
    host: str = ""
    """Name of the host; empty if it concerns all hosts together."""


amber, red = partial(Finding, AMBER), partial(Finding, RED)
"""Constructors of findings from check, what, fix and host."""


def green(check: str, what: str, host: str = "") -> Finding:
    return Finding(GREEN, check, what, "", host)


def judged(check: str, what: str, host: str, *problems: tuple[object, str, str, str]) -> Finding:
    """The first problem that applies, else green. A problem is (whether it applies, level, text to append, fix)."""
    for there, level, more, fix in problems:
        if there:
            return Finding(level, check, what + more, fix, host)
    return green(check, what, host)


def worst(findings: Sequence[Finding]) -> str:
    return min((finding.level for finding in findings), key=_RANK.__getitem__, default=GREEN)


def as_json(findings: Sequence[Finding], seconds: float) -> str:
    """The findings as one JSON object with `level`, `seconds` and `findings`."""
    found = {"level": worst(findings), "seconds": round(seconds, 1), "findings": [asdict(item) for item in findings]}
    return json.dumps(found, indent=1)


def print_findings(findings: Sequence[Finding], hosts: Sequence[str], seconds: float, out: TextIO) -> None:
    """Print one line per finding, worst first; equal findings of several hosts are merged."""
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for one in findings:
        merged.setdefault((one.level, one.check, one.what, one.fix), []).append(one.host)
    coloured = out.isatty() and "NO_COLOR" not in os.environ
    for (level, check, what, fix), where in sorted(merged.items(), key=lambda item: _RANK[item[0][0]]):
        label = f"\033[{_COLOURS[level]}m{level:5}\033[0m" if coloured else f"{level:5}"
        suffix = "" if len(hosts) == 1 or where == [""] else f" [{_names(where, hosts)}]"
        out.write(f"{label}  {check}{suffix}: {shown(what)}\n")
        if fix:
            out.write(f"       fix: {shown(fix)}\n")
    total = ", ".join(f"{sum(item.level == level for item in findings)} {level}" for level in _COLOURS)
    out.write(f"{total}; {len(hosts)} host{'s' * (len(hosts) != 1)}, {seconds:.0f} s\n")


def _names(where: Sequence[str], hosts: Sequence[str]) -> str:
    if len(where) == len(hosts):
        return f"all {len(hosts)} hosts"
    some = ", ".join(where[:8])
    return f"{some} and {len(where) - 8} more" if len(where) > 8 else some


def format_bytes(number: float) -> str:
    """A number of bytes as text, such as `1.5 GiB`."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number / 1024:.0f} KiB"
