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

Told = Sequence[tuple[str, Mapping[str, str]]]
"""Findings, each with what is named of it, under the same names in all."""


def finish(
    options: argparse.Namespace, report: Mapping[str, Any], head: str, told: Told, sections: Mapping[str, Sequence[str]]
) -> int:
    """Print an audit, and write it where `options` ask for it; returns the exit code.

    report: the JSON, with its `verdict`. head: what was audited, a line each. sections: lines by their heading.
    """
    if options.json is not None:
        write_atomically(options.json, (json.dumps(report, indent=1) + "\n").encode())
    if options.page is not None:
        write_atomically(options.page, _page(report, head, told, sections).encode())
    columns = min(100, max(60, shutil.get_terminal_size((80, 24)).columns))
    fill = partial(textwrap.fill, width=columns, break_long_words=False, break_on_hyphens=False)
    print("\n".join(map(fill, head.splitlines())))
    for says, named in told:
        print(f"\n{fill(says)}")
        for name, text in named.items():
            if text:
                print(fill(text, initial_indent=f"  {name + ':':<10}", subsequent_indent=" " * 12))
    for heading, lines in sections.items():
        if lines:
            listed = [fill(line, initial_indent="  - ", subsequent_indent="    ") for line in lines]
            print("\n".join([f"\n{heading}", *listed]))
    print(f"\nverdict: {report['verdict']}")
    return DIVERGED if report["verdict"].startswith("wrong") else DONE


def _page(report: Mapping[str, Any], head: str, told: Told, sections: Mapping[str, Sequence[str]]) -> str:
    from tracking.pages.document import Tone, document  # the audit of configs starts without what these need
    from tracking.pages.markdown import Table, page, section, text

    steps = report.get("steps", [])
    figures = dict.fromkeys(name for step in steps for name in step if name not in ("step", "shares", "lr"))
    measured = Table(("", *(f"step {step['step']}" for step in steps)))
    for name in figures:
        values = (step.get(name) for step in steps)
        cells = ("-" if value is None else f"{value:.5g}" if isinstance(value, float) else value for value in values)
        measured.add(name.replace("_", " "), *cells)
    found = Table(
        ("found", *(told[0][1] if told else ())), ((text(says), *map(text, named.values())) for says, named in told)
    )
    content = page(
        "# Audit",
        f"**{text(report['verdict'])}**: {text(head)}",
        section("Findings, the gravest first", found if told else ""),
        *(section(heading, [text(line) for line in lines]) for heading, lines in sections.items()),
        section("Measured", measured if steps else ""),
    )
    open_: Tone = "warn" if sections.get("Not checked") else "good"
    return document(content, Path(), tone="bad" if report["verdict"].startswith("wrong") else open_)
