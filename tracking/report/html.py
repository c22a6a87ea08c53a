"""A report as one self-contained HTML page: the verdict first, then curves and numbers, how they were computed last."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from tracking.compare.html import run_data
from tracking.heatmap.grid import read_heat
from tracking.heatmap.page import static_heat
from tracking.pages.render import render
from tracking.report.context import Finding, percent
from tracking.report.measures import count_verdicts
from tracking.report.page import results
from tracking.report.service_levels import ServiceLevels, format_budget, format_level
from tracking.run_facts import RunFacts
from tracking.summary import Summary

_MARKS = {"pass": "✓ pass", "fail": "✗ fail", "not measured": "not measured"}
_ORDER = ("fail", "pass", "not measured")


def run_page(facts: RunFacts, summary: Summary, findings: Sequence[Finding], remarks: Sequence[str]) -> str:
    """The whole page about one run, UTF-8 text."""
    return render(
        "report/run.html",
        title=summary.name,
        summary=summary,
        counted=count_verdicts(findings),
        remarks=remarks,
        findings=sorted(findings, key=lambda item: _ORDER.index(item.verdict)),
        results=results(summary),
        data=run_data(facts) if len(facts.columns) else None,
        heat=static_heat(read_heat(facts.events)) if facts.events is not None else [],
        repeats=False,
        mark=_mark,
    )


def levels_page(found: ServiceLevels) -> str:
    """The whole page about many runs, UTF-8 text."""
    return render(
        "report/levels.html",
        title=f"Service levels of {found.ended:,} ended runs",
        found=found,
        weeks=sorted({week for level in found.levels for week in level.weeks}, reverse=True),
        percent=percent,
        format_level=format_level,
        format_budget=format_budget,
        mark=_mark,
    )


def _mark(verdict: str) -> Markup:
    kind = "dim" if verdict == "not measured" else verdict
    return Markup('<span class="mark {}">{}</span>').format(kind, _MARKS[verdict])
