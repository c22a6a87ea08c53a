"""The twelve measures, and service levels, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from config.printable import shown
from tracking.pages.markdown import Table
from tracking.report.context import Finding, Verdict, percent
from tracking.report.service_levels import Level, ServiceLevels, format_budget, format_level
from tracking.terminal import words

_MEASURES = ("measure", "value", "limit", "verdict")
STYLES: dict[Verdict, str] = {"pass": "green", "fail": "bold red", "not measured": "dim"}


def show_findings(findings: Sequence[Finding], remarks: Sequence[str], console: Console) -> None:
    """Print the measures with their verdicts."""
    table = Table(_MEASURES, title="Measures")
    for item in findings:
        verdict = Text(item.verdict, style=STYLES[item.verdict])
        if item.reason:
            verdict.append(shown(f": {item.reason}"), style="" if item.verdict == "fail" else "dim")
        table.add(item.title, item.shown or "-", item.limit, verdict)
    console.print(table.grid())
    for remark in remarks:
        console.print(words(f"! {remark}", "yellow"))


def show_levels(found: ServiceLevels, console: Console) -> None:
    """Print service levels, the weeks, and what went wrong."""
    head = ("level", "objective", "good", "level reached", "error budget left", "verdict")
    table = Table(head, title=f"Service levels of {found.ended} ended runs")
    for level in found.levels:
        verdict = Text(level.verdict, style=STYLES[level.verdict])
        good = f"{level.total.good:,} of {level.total.count:,}"
        objective = f"at least {percent(level.objective)}"
        table.add(level.title, objective, good, format_level(level), format_budget(level), verdict)
    console.print(table.grid())
    weeks = sorted({week for level in found.levels for week in level.weeks})
    rows = [(week, *(_week(level, week) for level in found.levels)) for week in weeks]
    by_week = Table(("week", *(level.title for level in found.levels)), rows, title="By week (UTC, of a run's end)")
    console.print(by_week.grid())
    for failure in found.failures:
        console.print(words(f"{failure.when}  {failure.run}: {failure.what}"), soft_wrap=True)
    if found.more_failures:
        console.print(Text(f"and {found.more_failures:,} more; the newest are shown", style="dim"))
    for remark in found.remarks:
        console.print(words(f"! {remark}", "yellow"), soft_wrap=True)


def _week(level: Level, week: str) -> str:
    tally = level.weeks.get(week)
    if tally is None:
        return "-"
    burn = level.burn_rate(tally)
    rate = "" if burn is None or not tally.bad else f", burn rate {burn:.3g}"
    return f"{tally.good:,} of {tally.count:,}{rate}"
