"""The twelve measures, and service levels, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from config.printable import shown
from tracking.report.context import Finding, Verdict, percent
from tracking.report.service_levels import Level, ServiceLevels, format_budget, format_level
from tracking.terminal import words

STYLES: dict[Verdict, str] = {"pass": "green", "fail": "bold red", "not measured": "dim"}


def show_findings(findings: Sequence[Finding], remarks: Sequence[str], console: Console) -> None:
    """Print the measures with their verdicts."""
    grid = Table(title="Measures", title_justify="left", title_style="bold")
    for name in ("measure", "value", "limit", "verdict"):
        grid.add_column(name, overflow="fold")
    for item in findings:
        verdict = Text(item.verdict, style=STYLES[item.verdict])
        if item.reason:
            verdict.append(shown(f": {item.reason}"), style="" if item.verdict == "fail" else "dim")
        grid.add_row(item.title, words(item.shown or "-"), words(item.limit), verdict)
    console.print(grid)
    for remark in remarks:
        console.print(words(f"! {remark}", "yellow"))


def show_levels(found: ServiceLevels, console: Console) -> None:
    """Print service levels, the weeks, and what went wrong."""
    grid = Table(title=f"Service levels of {found.ended} ended runs", title_justify="left", title_style="bold")
    for name in ("level", "objective", "good", "level reached", "error budget left", "verdict"):
        grid.add_column(name, overflow="fold")
    for level in found.levels:
        verdict = Text(level.verdict, style=STYLES[level.verdict])
        good = f"{level.total.good:,} of {level.total.count:,}"
        reached = format_level(level)
        grid.add_row(level.title, f"at least {percent(level.objective)}", good, reached, format_budget(level), verdict)
    console.print(grid)
    console.print(_weeks(found.levels))
    for failure in found.failures:
        console.print(words(f"{failure.when}  {failure.run}: {failure.what}"), soft_wrap=True)
    if found.more_failures:
        console.print(Text(f"and {found.more_failures:,} more; the newest are shown", style="dim"))
    for remark in found.remarks:
        console.print(words(f"! {remark}", "yellow"), soft_wrap=True)


def _weeks(levels: Sequence[Level]) -> Table:
    grid = Table(title="By week (UTC, of a run's end)", title_justify="left", title_style="bold")
    grid.add_column("week")
    for level in levels:
        grid.add_column(level.title, overflow="fold")
    weeks = sorted({week for level in levels for week in level.weeks})
    for week in weeks:
        grid.add_row(week, *(_week(level, week) for level in levels))
    return grid


def _week(level: Level, week: str) -> str:
    tally = level.weeks.get(week)
    if tally is None:
        return "-"
    burn = level.burn_rate(tally)
    rate = "" if burn is None or not tally.bad else f", burn rate {burn:.3g}"
    return f"{tally.good:,} of {tally.count:,}{rate}"
