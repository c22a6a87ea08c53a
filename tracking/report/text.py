"""The twelve measures as Markdown for `report.md` and as a table for a terminal; service levels as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tracking.report.context import Finding, Verdict, percent
from tracking.report.service_levels import Level, ServiceLevels, format_budget, format_level

STYLES: dict[Verdict, str] = {"pass": "green", "fail": "bold red", "not measured": "dim"}


def markdown(findings: Sequence[Finding], remarks: Sequence[str]) -> str:
    """A table of the measures and how each was computed below it."""
    lines = "".join(f"> {remark}\n\n" for remark in remarks)
    lines += "| measure | value | limit | verdict |\n|---|---|---|---|\n"
    for item in findings:
        cells = (item.title, item.shown or "-", item.limit, _verdict(item))
        lines += "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |\n"
    how = "".join(f"- **{item.title}**: {item.how}.\n" for item in findings)
    return f"{lines}\n<details><summary>How they were computed</summary>\n\n{how}\n</details>\n"


def _verdict(item: Finding) -> str:
    word = f"**{item.verdict}**" if item.verdict == "fail" else item.verdict
    return f"{word}: {item.reason}" if item.reason else word


def show_findings(findings: Sequence[Finding], remarks: Sequence[str], console: Console) -> None:
    """Print the measures with their verdicts."""
    table = Table(title="Measures", title_justify="left", title_style="bold")
    for name in ("measure", "value", "limit", "verdict"):
        table.add_column(name, overflow="fold")
    for item in findings:
        verdict = Text(item.verdict, style=STYLES[item.verdict])
        if item.reason:
            verdict.append(f": {item.reason}", style="" if item.verdict == "fail" else "dim")
        table.add_row(item.title, item.shown or "-", item.limit, verdict)
    console.print(table)
    for remark in remarks:
        console.print(Text(f"! {remark}", style="yellow"))


def show_levels(found: ServiceLevels, console: Console) -> None:
    """Print service levels, the weeks, and what went wrong."""
    table = Table(title=f"Service levels of {found.ended} ended runs", title_justify="left", title_style="bold")
    for name in ("level", "objective", "good", "level reached", "error budget left", "verdict"):
        table.add_column(name, overflow="fold")
    for level in found.levels:
        verdict = Text(level.verdict, style=STYLES[level.verdict])
        good = f"{level.total.good:,} of {level.total.count:,}"
        reached = format_level(level)
        table.add_row(level.title, f"at least {percent(level.objective)}", good, reached, format_budget(level), verdict)
    console.print(table)
    console.print(_weeks(found.levels))
    for failure in found.failures:
        console.print(Text(f"{failure.when}  {failure.run}: {failure.what}"), soft_wrap=True)
    if found.more_failures:
        console.print(Text(f"and {found.more_failures:,} more; the newest are shown", style="dim"))
    for remark in found.remarks:
        console.print(Text(f"! {remark}", style="yellow"), soft_wrap=True)


def _weeks(levels: Sequence[Level]) -> Table:
    table = Table(title="By week (UTC, of a run's end)", title_justify="left", title_style="bold")
    table.add_column("week")
    for level in levels:
        table.add_column(level.title, overflow="fold")
    weeks = sorted({week for level in levels for week in level.weeks})
    for week in weeks:
        table.add_row(week, *(_week(level, week) for level in levels))
    return table


def _week(level: Level, week: str) -> str:
    tally = level.weeks.get(week)
    if tally is None:
        return "-"
    burn = level.burn_rate(tally)
    rate = "" if burn is None or not tally.bad else f", burn rate {burn:.3g}"
    return f"{tally.good:,} of {tally.count:,}{rate}"
