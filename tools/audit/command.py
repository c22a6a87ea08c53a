"""Checks whether another trainer on DeepSpeed trains correctly: from its configs, without training, or from the steps
that a probe recorded in it.

  python -m tools.audit --deepspeed-config ds.json --trainer-config training_args.json
  python -m tools.audit --write-probe .
  python -m tools.audit PROBE_FOLDER

Exit code 3 if training is found wrong, 2 for bad input or if nothing could be compared, 0 otherwise.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from config.cli import CONFIG_ERROR, DIVERGED, DONE, Arguments, entry_point
from config.deepspeed.document import read_document
from config.errors import UserError
from config.files import why_not_writable, write_atomically
from config.options import positive_int
from tools.audit.configs import KINDS, NAMES, Audit, audit_configs, read_given, read_model, read_trainer_file

_NAMED = ("measured", "steps", "thread", "instead")


@entry_point(closed_pipe=DIVERGED)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = Arguments("python -m tools.audit", __doc__)
    add, repeat = parser.add_argument, partial(parser.add_argument, action="append", default=[])
    add("folder", nargs="?", type=Path, help="what a probe wrote: its steps are recomputed")
    add("--deepspeed-config", type=Path, metavar="FILE", help="DeepSpeed JSON to audit")
    told = f"{', '.join(KINDS)}, told by its keys; may be repeated"
    repeat("--trainer-config", type=Path, metavar="FILE", help=told)
    add("--trainer", choices=("hf", "trl", "accelerate", "own"), help="whose loop (default: by the files)")
    add("--optimizer", metavar="NAME", help="where no file names it (default: adamw)")
    add("--model", metavar="NAME_OR_PATH", help="its config.json tells type and dropout; a probe's steps began with it")
    add("--ranks", type=positive_int, metavar="N", help="processes")
    versions = "a version in place of the installed one: deepspeed=0.17.6; may be repeated"
    repeat("--with", dest="versions", metavar="PACKAGE=VERSION", help=versions)
    add("--write-probe", type=Path, metavar="DIR", help="copy mantissa_probe.py there")
    add("--json", type=Path, metavar="FILE", help="write the findings there")
    add("--page", type=Path, metavar="FILE", help="write a page there")
    add("--reference", metavar="MODEL", help="DPO's reference, where it is not the policy of step 1")
    given = parser.parse_args(arguments)
    path, configs = given.deepspeed_config, given.deepspeed_config is not None or bool(given.trainer_config)
    if [given.folder is not None, given.write_probe is not None, configs].count(True) != 1:
        raise UserError("command line: give one of --deepspeed-config FILE, a probe's folder, or --write-probe DIR")
    probe = given.write_probe and given.write_probe / "mantissa_probe.py"
    for output in filter(None, (given.json, given.page, probe)):
        if why := why_not_writable(output.parent):
            raise UserError(f"{output}: cannot be written: {why}")
    if given.write_probe is not None:
        return write_probe(probe)
    if given.folder is not None:
        from tools.audit.judge import audit_folder  # loads torch

        return finish(given, audit_folder(given.folder, given.model, given.reference))
    decided = {"trainer": "hf" if given.trainer == "trl" else given.trainer, "ranks": given.ranks}
    decided |= {"optimizer": given.optimizer, **(read_model(given.model) if given.model else {})}
    document = None if path is None else (str(path), read_document(path))
    files = [read_trainer_file(path) for path in given.trainer_config]
    return finish(given, audit_configs(read_given(files, document, decided, given.versions)))


def write_probe(target: Path) -> int:
    """Write the probe, and print how to use it. Raises UserError if a different file is there."""
    probe = Path(__file__).with_name("mantissa_probe.py").read_bytes()
    if target.exists() and target.read_bytes() != probe:
        raise UserError(f"{target}: is there already and differs; remove it, or give another folder")
    write_atomically(target, probe)
    print(f"wrote {target}: {ast.get_docstring(ast.parse(probe))}")
    return DONE


def finish(options: argparse.Namespace, audit: Audit) -> int:
    """Print an audit, and write the files that `options` request; returns the exit code."""
    if options.json is not None:
        from tracking.jsonl import plain  # the audit of configs must start without its imports

        write_atomically(options.json, (json.dumps(plain(audit.report), indent=1) + "\n").encode())
    if options.page is not None:
        write_atomically(options.page, _page(audit).encode())
    columns = min(100, max(60, shutil.get_terminal_size((80, 24)).columns))
    fill = partial(textwrap.fill, width=columns, break_long_words=False, break_on_hyphens=False)
    print("\n".join(map(fill, audit.head.splitlines())))
    for finding in audit.told:
        print(f"\n{fill(_title(finding))}")
        for name in _NAMED:
            if finding.get(name):
                print(fill(finding[name], initial_indent=f"  {name + ':':<10}", subsequent_indent=" " * 12))
    for heading, lines in audit.more.items():
        if lines:
            listed = [fill(line, initial_indent="  - ", subsequent_indent="    ") for line in lines]
            print("\n".join([f"\n{heading}", *listed]))
    verdict = audit.report["verdict"]
    print(f"\nverdict: {verdict}")
    if verdict.startswith("nothing was compared"):
        return CONFIG_ERROR
    return DIVERGED if verdict.startswith("wrong") else DONE


def _title(finding: Mapping[str, Any]) -> str:
    return f"{finding['severity'].upper()}: {finding['says']} [{finding['id']}]"


def _page(audit: Audit) -> str:
    from tracking.numbers import number  # the audit of configs must start without their imports
    from tracking.pages.document import Tone, document
    from tracking.pages.markdown import Table, page, section, text

    columns = [name for name in _NAMED if any(finding.get(name) for finding in audit.told)]
    found = Table(("found", *columns))
    for finding in audit.told:
        found.add(text(_title(finding)), *(text(finding.get(name) or "") for name in columns))
    steps = audit.report.get("steps", [])
    measured = Table(("", *(f"step {step['step']}" for step in steps)))
    for name in NAMES["figures"] if steps else ():
        measured.add(name.replace("_", " "), *(number(step.get(name), 5) for step in steps))
    content = page(
        "# Audit",
        f"**{text(audit.report['verdict'])}**: {text(audit.head)}",
        section("Findings, the gravest first", found),
        *(section(heading, [text(line) for line in lines]) for heading, lines in audit.more.items()),
        section("Measured", measured),
    )
    open_: Tone = "warn" if audit.more.get("Not checked") else "good"
    return document(content, Path(), tone="bad" if audit.report["verdict"].startswith("wrong") else open_)
