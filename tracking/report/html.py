"""A report as one self-contained HTML page: the verdict first, then curves and numbers, how they were computed last."""

from __future__ import annotations

from markupsafe import Markup

from tracking.numbers import percent
from tracking.pages.render import render
from tracking.report.service_levels import ServiceLevels, format_budget, format_level

_MARKS = {"pass": "✓ pass", "fail": "✗ fail", "not measured": "not measured"}


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
        mark=mark,
    )


def mark(verdict: str) -> Markup:
    kind = "dim" if verdict == "not measured" else verdict
    return Markup('<span class="mark {}">{}</span>').format(kind, _MARKS[verdict])
