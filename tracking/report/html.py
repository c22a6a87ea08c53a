"""A report as one self-contained HTML page with the plot inlined, in the light or dark theme of the reader's system."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence

from tracking.html_text import text
from tracking.report.context import Finding, percent
from tracking.report.measures import count_verdicts
from tracking.report.page import results
from tracking.report.service_levels import Level, ServiceLevels, Tally, format_budget, format_level
from tracking.run_dir import RunDir
from tracking.summary import Summary

_STYLE = """
:root { color-scheme: light dark; --paper: light-dark(#ffffff, #14171c); --card: light-dark(#f7f8fa, #1c2027);
  --ink: light-dark(#1c2026, #e6e9ee); --dim: light-dark(#5d6673, #98a2b0); --line: light-dark(#dfe3e8, #323945);
  --good: light-dark(#00694e, #3fd0a4); --bad: light-dark(#b3261e, #ff8a80); --warn: light-dark(#7a5a00, #e5b53a); }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 1.2rem 1.5rem 3rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
h1 { font-size: 1.3rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 1.8rem 0 0.5rem; }
p { margin: 0.3rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.4rem 0.8rem 0.4rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
thead th, .dim { color: var(--dim); font-weight: 400; }
tbody th { font-weight: 600; white-space: nowrap; }
.stack td:last-child { min-width: 11rem; } .stack td:nth-child(3) { min-width: 9rem; }
td { min-width: 6rem; }
.how { color: var(--dim); font-size: 0.88em; }
.mark { font-weight: 600; white-space: nowrap; }
.pass { color: var(--good); } .fail { color: var(--bad); } .warn { color: var(--warn); }
.bar { height: 0.5rem; width: 9rem; background: var(--line); border-radius: 99px; overflow: hidden; }
.bar i { display: block; height: 100%; background: var(--good); }
img { max-width: 100%; border-radius: 8px; background: #ffffff; }
@media (max-width: 760px) {
  .stack thead { display: none; }
  .stack th, .stack td { display: block; padding: 0.1rem 0; border: 0; }
  .stack tr { display: block; padding: 0.5rem 0; border-bottom: 1px solid var(--line); }
}
"""
_MARKS = {"pass": "&#10003; pass", "fail": "&#10007; fail", "not measured": "not measured"}


def run_page(run_dir: RunDir, summary: Summary, findings: Sequence[Finding], remarks: Sequence[str]) -> str:
    """The whole page about one run, UTF-8 text. Its plot is the one that `write_report` drew."""
    rows = "".join(f"<tr><th>{text(what)}</th><td>{text(value)}</td></tr>" for what, value in results(summary))
    plot = run_dir.plots / "run.png"
    picture = ""
    if summary.steps and plot.is_file():
        source = b64encode(plot.read_bytes()).decode()
        picture = f'<h2>Curves</h2><img alt="loss, gradient norm, learning rate" src="data:image/png;base64,{source}">'
    cause = f": {summary.cause}" if summary.cause else ""
    head = f"<h1>{text(summary.name)}</h1><p>{text(summary.status + cause)}</p>"
    verdicts = f"<h2>Measures</h2><p>{text(count_verdicts(findings))}</p>{_remarks(remarks)}{_findings(findings)}"
    return _page(summary.name, f"{head}{verdicts}{picture}<h2>Results</h2>{_table((), rows)}")


def levels_page(found: ServiceLevels) -> str:
    """The whole page about many runs, UTF-8 text."""
    rows = "".join(_level(level) for level in found.levels)
    head = ("level", "objective", "good", "reached", "error budget left", "verdict")
    weeks = sorted({week for level in found.levels for week in level.weeks}, reverse=True)
    by_week = "".join(
        f"<tr><th>{week}</th>{''.join(_week(level, level.weeks.get(week)) for level in found.levels)}</tr>"
        for week in weeks
    )
    failures = "".join(
        f"<tr><td class=dim>{item.when}</td><th>{text(item.run)}</th><td>{text(item.what)}</td></tr>"
        for item in found.failures
    )
    parts = [
        f"<h1>Service levels of {found.ended:,} ended runs</h1>{_remarks(found.remarks)}{_table(head, rows)}",
        f"<h2>By week (UTC, of a run's end)</h2>{_table(('week', *(level.title for level in found.levels)), by_week)}",
    ]
    if failures:
        more = f"<p class=dim>and {found.more_failures:,} older ones</p>" if found.more_failures else ""
        parts.append(f"<h2>What went wrong</h2>{_table((), failures, kind='stack')}{more}")
    return _page("service levels", "".join(parts))


def _page(title: str, body: str) -> str:
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body>{body}</body></html>\n"
    )


def _findings(findings: Sequence[Finding]) -> str:
    rows = []
    for item in findings:
        reason = f"<br>{text(item.reason)}" if item.reason else ""
        rows.append(
            f"<tr><th>{text(item.title)}</th><td>{text(item.shown or '-')}<div class=how>{text(item.how)}</div></td>"
            f"<td>{text(item.limit)}</td><td>{_mark(item.verdict)}{reason}</td></tr>"
        )
    return _table(("measure", "value, and how it was computed", "limit", "verdict"), "".join(rows), kind="stack")


def _level(level: Level) -> str:
    left = level.budget_left
    bar = "" if left is None else f'<div class=bar><i style="width:{100 * min(1.0, max(0.0, left)):.1f}%"></i></div>'
    cells = (
        f"at least {percent(level.objective)}",
        f"{level.total.good:,} of {level.total.count:,}",
        format_level(level),
        f"{bar}{text(format_budget(level))}",
        _mark(level.verdict),
    )
    return f"<tr><th>{text(level.title)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _week(level: Level, tally: Tally | None) -> str:
    if tally is None:
        return "<td class=dim>-</td>"
    burn = level.burn_rate(tally)
    rate = f" <span class=fail>burn rate {burn:.3g}</span>" if burn is not None and tally.bad else ""
    return f"<td>{tally.good:,} of {tally.count:,}{rate}</td>"


def _mark(verdict: str) -> str:
    kind = "dim" if verdict == "not measured" else verdict
    return f'<span class="mark {kind}">{_MARKS[verdict]}</span>'


def _remarks(remarks: Sequence[str]) -> str:
    return "".join(f"<p class=warn>{text(remark)}</p>" for remark in remarks)


def _table(head: Sequence[str], rows: str, *, kind: str = "plain") -> str:
    top = f"<thead><tr>{''.join(f'<th>{text(name)}</th>' for name in head)}</tr></thead>" if head else ""
    return f"<div class=scroll><table class={kind}>{top}<tbody>{rows}</tbody></table></div>"
