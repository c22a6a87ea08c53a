"""The twelve measures of a run with verdicts, or the service levels of many runs, from run folders alone.

    python -m tracking.report RUN [--baseline FP32_RUN]     also writes RUN/report.md; for crashed and running runs too
    python -m tracking.report --runs 'runs/*'               job success, divergence and restores, with an error budget

Exit codes: 0; 2 if a run cannot be read or an option is wrong; 3 with --gate if a verdict is "fail".
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from config.cli import Arguments, entry_point
from config.errors import UserError
from config.options import positive_number
from config.printable import shown
from config.redact import redact
from tracking.jsonl import encode
from tracking.pages.markdown import Table
from tracking.report.context import LIMITS, Finding, Limit, MeasureContext, Verdict
from tracking.report.files import numbers_given, write_page
from tracking.report.measures import all_measures, caveats, count_verdicts
from tracking.report.page import summary_table, write_report
from tracking.report.service_levels import (
    ServiceLevels,
    levels_page,
    levels_tables,
    objectives_from,
    run_folders,
    service_levels,
)
from tracking.summary import read_run
from tracking.terminal import console, words

FAILED = 3
_DAY = 86400.0
_COLUMNS = 140
STYLES: dict[Verdict, str] = {"pass": "green", "fail": "bold red", "not measured": "dim"}


@entry_point()
def main(arguments: list[str] | None = None) -> int:
    """Report on one run or on many; returns the exit code."""
    parser = Arguments("python -m tracking.report", __doc__)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="run folder, such as runs/demo")
    parser.add_argument("--baseline", type=Path, metavar="RUN", help="run folder of the same work in FP32")
    parser.add_argument("--price", type=positive_number, metavar="MONEY", help="price of one device for one hour")
    parser.add_argument("--peak-tflops", type=positive_number, metavar="N", help="dense 16-bit peak of one device")
    parser.add_argument(
        "--limit", action="append", default=[], metavar="KEY=VALUE", help="another limit, such as epoch_time=0.8"
    )
    parser.add_argument("--runs", nargs="+", metavar="GLOB", help="service levels of these run folders instead")
    parser.add_argument(
        "--days", type=positive_number, metavar="N", help="with --runs: only runs that ended in the last N days"
    )
    parser.add_argument(
        "--objective", action="append", default=[], metavar="KEY=SHARE", help="with --runs: such as job_success=0.995"
    )
    parser.add_argument("--gate", action="store_true", help="end with exit code 3 when a verdict is fail")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write one page, readable offline")
    options = parser.parse_args(arguments)
    if (options.run is None) == (options.runs is None):
        raise UserError("command line: give a run folder, or --runs with folders or globs, and not both")
    failed = _one(options) if options.run is not None else _many(options)
    return FAILED if options.gate and failed else 0


def limits_from(arguments: Sequence[str]) -> dict[str, Limit]:
    """LIMITS, overridden by KEY=VALUE `arguments`. Raises UserError for an unknown key or a value that is no number."""
    given = numbers_given("--limit", arguments, LIMITS, "epoch_time=0.8")
    return LIMITS | {key: replace(LIMITS[key], value=value, chosen=False) for key, value in given.items()}


def _one(options: argparse.Namespace) -> bool:
    """Report on one run; returns whether any measure fails."""
    context = MeasureContext(
        run=read_run(options.run),
        baseline=read_run(options.baseline) if options.baseline is not None else None,
        limits=limits_from(options.limit),
        price=options.price,
        peak=None if options.peak_tflops is None else options.peak_tflops * 1e12,
    )
    findings, remarks = all_measures(context), caveats(context)
    failed = any(item.verdict == "fail" for item in findings)
    report = None
    try:
        report = write_report(context)
    except OSError as error:  # a read-only run folder
        print(shown(f"report.md was not written: {error.filename}: {error.strerror}"), file=sys.stderr)
    if options.html is not None:
        from tracking.serve.run_page import printed  # imports Jinja2

        write_page(options.html, printed(context))
    if options.json:
        baseline = None if options.baseline is None else str(options.baseline)
        content = {"run": str(options.run), "baseline": baseline, "caveats": remarks, "failed": failed}
        _print_json(content | {"measures": [asdict(item) for item in findings]})
        return failed
    screen = console(columns=_COLUMNS)
    screen.print(summary_table(context.run))
    show_findings(findings, remarks, screen)
    screen.print(count_verdicts(findings))
    for path in filter(None, (report, options.html)):
        print(shown(path))
    return failed


def _many(options: argparse.Namespace) -> bool:
    """Report the service levels of many runs; returns whether any objective is missed."""
    now = time.time()
    since = -math.inf if options.days is None else now - options.days * _DAY
    objectives = objectives_from(options.objective)
    found = service_levels(run_folders(options.runs), objectives=objectives, now=now, since=since)
    if options.html is not None:
        write_page(options.html, levels_page(found))
    if options.json:
        _print_json(found.as_dict())
        return bool(found.missed)
    show_levels(found, console(columns=_COLUMNS))
    if options.html is not None:
        print(options.html)
    return bool(found.missed)


def show_findings(findings: Sequence[Finding], remarks: Sequence[str], console: Console) -> None:
    table = Table(("measure", "value", "limit", "verdict"), title="Measures")
    for item in findings:
        verdict = Text(item.verdict, style=STYLES[item.verdict])
        if item.reason:
            verdict.append(shown(f": {item.reason}"), style="" if item.verdict == "fail" else "dim")
        table.add(item.title, item.shown or "-", item.limit, verdict)
    console.print(table.grid())
    for remark in remarks:
        console.print(words(f"! {remark}", "yellow"))


def show_levels(found: ServiceLevels, console: Console) -> None:
    """Print the service levels, overall and by week, and what went wrong."""
    for table in levels_tables(found, lambda verdict: Text(verdict, style=STYLES[verdict])):
        console.print(table.grid())
    for failure in found.failures:
        console.print(words(f"{failure.day}  {failure.run}: {failure.what}"), soft_wrap=True)
    if found.more_failures:
        console.print(Text(f"and {found.more_failures:,} more; the newest are shown", style="dim"))
    for remark in found.remarks:
        console.print(words(f"! {remark}", "yellow"), soft_wrap=True)


def _print_json(content: dict[str, Any]) -> None:
    sys.stdout.write(encode(redact(content)).decode())
