"""How both audits end: what they found as text, as JSON and as a page, and the exit code."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from config.cli import DIVERGED, DONE
from config.files import write_atomically

Findings = Sequence[Mapping[str, Any]]
Sections = Mapping[str, Sequence[str]]
"""Lines by their heading."""
_NAMED = ("measured", "steps", "thread", "instead")


def finish(options: argparse.Namespace, report: Mapping[str, Any], head: str, told: Findings, more: Sections) -> int:
    """Print an audit, and write it where `options` ask for it; returns the exit code.

    report: the JSON, with its `verdict`. head: what was audited, a line each. told: findings that are shown in full.
    """
    if options.json is not None:
        write_atomically(options.json, (json.dumps(report, indent=1) + "\n").encode())
    if options.page is not None:
        write_atomically(options.page, _page(report, head, told, more).encode())
    columns = min(100, max(60, shutil.get_terminal_size((80, 24)).columns))
    fill = partial(textwrap.fill, width=columns, break_long_words=False, break_on_hyphens=False)
    print("\n".join(map(fill, head.splitlines())))
    for finding in told:
        print(f"\n{fill(_title(finding))}")
        for name in _NAMED:
            if finding.get(name):
                print(fill(finding[name], initial_indent=f"  {name + ':':<10}", subsequent_indent=" " * 12))
    for heading, lines in more.items():
        if lines:
            listed = [fill(line, initial_indent="  - ", subsequent_indent="    ") for line in lines]
            print("\n".join([f"\n{heading}", *listed]))
    print(f"\nverdict: {report['verdict']}")
    return DIVERGED if report["verdict"].startswith("wrong") else DONE


def _title(finding: Mapping[str, Any]) -> str:
    return f"{finding['severity'].upper()}: {finding['says']} [{finding['id']}]"


def _page(report: Mapping[str, Any], head: str, told: Findings, more: Sections) -> str:
    from tracking.pages.document import Tone, document  # the audit of configs starts without what these need
    from tracking.pages.markdown import Table, page, section, text

    named = [name for name in _NAMED if any(finding.get(name) for finding in told)]
    found = Table(("found", *named))
    for finding in told:
        found.add(text(_title(finding)), *(text(finding.get(name) or "") for name in named))
    steps = report.get("steps", [])
    measured = Table(("", *(f"step {step['step']}" for step in steps)))
    for name in dict.fromkeys(name for step in steps for name in step if name not in ("step", "shares", "lr")):
        values = (step.get(name) for step in steps)
        cells = ("-" if value is None else f"{value:.5g}" if isinstance(value, float) else value for value in values)
        measured.add(name.replace("_", " "), *cells)
    content = page(
        "# Audit",
        f"**{text(report['verdict'])}**: {text(head)}",
        section("Findings, the gravest first", found if told else ""),
        *(section(heading, [text(line) for line in lines]) for heading, lines in more.items()),
        section("Measured", measured if steps else ""),
    )
    open_: Tone = "warn" if more.get("Not checked") else "good"
    return document(content, Path(), tone="bad" if report["verdict"].startswith("wrong") else open_)
