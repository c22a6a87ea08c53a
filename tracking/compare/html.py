"""A comparison as one self-contained page: tables as plain HTML, curves drawn by plotly.js, which is inlined.

The page needs no network and no server. plotly.js comes with the `plotly` package, unchanged; it is what makes the page
5 MB.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from tracking.compare.curves import curve, gap, marks, means, validation
from tracking.compare.differences import Difference, format_value
from tracking.compare.measures import Measure
from tracking.compare.result import Comparison, Pair
from tracking.compare.text import COMPARABLE, SIDE_BY_SIDE, event_line, format_measure
from tracking.events import format_scale
from tracking.html_text import script_json, text
from tracking.run_facts import RunFacts

_PAGE, _SCRIPT, _STYLE = (Path(__file__).with_name(f"page.{suffix}") for suffix in ("html", "js", "css"))
_MAX_EVENTS = 60


def page(comparison: Comparison) -> str:
    """The whole page, UTF-8 text."""
    from plotly.offline import get_plotlyjs

    few = len(comparison.runs) <= SIDE_BY_SIDE
    parts = {
        "@TITLE@": text(" / ".join(run.label for run in comparison.runs[:3]) + (" / ..." * (len(comparison.runs) > 3))),
        "@STYLE@": _STYLE.read_text(encoding="utf-8"),
        "@LEGEND@": "".join(_chip(index, run) for index, run in enumerate(comparison.runs)),
        "@CAVEATS@": _caveats(comparison) if comparison.pairs else "",
        "@ANSWERS@": _answers(comparison, few),
        "@DIVERGENCES@": _section("The steps around", "".join(_pair(pair, few) for pair in comparison.pairs)),
        "@MEASURES@": _measures(comparison),
        "@DIFFERENCES@": _section("What differs", _differences(comparison) if comparison.pairs else ""),
        "@DATA@": data(comparison),
        "@SCRIPT@": _SCRIPT.read_text(encoding="utf-8"),
        "@PLOTLY@": get_plotlyjs(),
    }
    template = _PAGE.read_text(encoding="utf-8")
    pieces: list[str] = re.split(r"(@[A-Z]+@)", template)  # once: an inserted part may hold such a word too
    return "".join(parts.get(piece, piece) for piece in pieces)


def data(comparison: Comparison) -> str:
    """What the script draws, as JSON that is safe within a <script>."""
    runs = [
        {"label": run.label, "curve": curve(run), "means": means(run)}
        | {"validation": validation(run), "marks": marks(run)}
        for run in comparison.runs
    ]
    gaps = [gap(pair.divergence) for pair in comparison.pairs]
    divergences = [
        {"run": index, "step": pair.divergence.step, "beyond": pair.divergence.beyond_tolerance}
        for index, pair in enumerate(comparison.pairs, start=1)
    ]
    return script_json({"runs": runs, "gaps": gaps, "divergences": divergences})


def _chip(index: int, run: RunFacts) -> str:
    role = "baseline, " if index == 0 else ""
    title = text(f"{role}{run.status_and_cause}; {run.source}")
    return (
        f'<button class="chip" data-run="{index}" title="{title}" aria-pressed="true">'
        f'<svg width="26" height="8"><line x1="0" y1="4" x2="26" y2="4"/></svg>{text(run.label)}</button>'
    )


def _caveats(comparison: Comparison) -> str:
    if not comparison.caveats:
        return f'<div class="note good"><b>{COMPARABLE}</b></div>'
    lines = "".join(f"<li>{text(line)}</li>" for line in comparison.caveats)
    return f'<div class="note warn"><b>Not directly comparable</b><ul>{lines}</ul></div>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _answers(comparison: Comparison, few: bool) -> str:
    divergences = "".join(_brief(pair, few) for pair in comparison.pairs)
    verdicts = "".join(f"<li>{text(line)}</li>" for line in comparison.verdicts) or "<li>no difference</li>"
    if not divergences:
        return ""
    where = _section("Where they diverge", f"<ul>{divergences}</ul>")
    return where + _section("Which is better", f"<ul>{verdicts}</ul>")


def _brief(pair: Pair, few: bool) -> str:
    step = pair.divergence.step
    headline = f"{text(pair.headline)}<br>" if few or step is None else f"diverge at step {step}: "
    return f"<li><b>{text(pair.run.label)}</b>: {headline}{text(pair.cause)}</li>"


def _pair(pair: Pair, few: bool) -> str:
    divergence = pair.divergence
    buttons = "".join(
        f'<button class="go" data-step="{step}">show step {step}</button>'
        for step in dict.fromkeys((divergence.step, divergence.beyond_tolerance))
        if step is not None
    )
    beyond = f"<p>Beyond the tolerance {text(pair.tolerance_cause)}.</p>" if pair.tolerance_cause else ""
    unfolded = " open" if few and divergence.step is not None else ""
    return (
        f"<details{unfolded} class='pair'><summary><b>{text(pair.run.label)}</b> "
        f"{text(pair.headline)}</summary><p><b>Cause:</b> {text(pair.cause)}.</p>{beyond}{buttons}"
        f"{_rows_table(pair)}{_events(pair)}</details>"
    )


def _rows_table(pair: Pair) -> str:
    if not pair.divergence.rows:
        return ""
    places = {pair.divergence.step, pair.divergence.beyond_tolerance}
    rows = []
    for row in sorted(pair.divergence.rows, key=lambda row: row["step"]):
        cells = [
            str(row["step"]),
            text(row["run"]),
            f"{row['loss']:.10g}",
            f"{row['grad_norm']:.8g}",
            f"{row['lr']:.6g}",
            format_scale(row["loss_scale"]),
            "yes" if row["applied"] else "skipped",
            f"<code>{text(row['sample_ids_sha256'])}</code>",
        ]
        hit = ' class="hit"' if row["step"] in places else ""
        rows.append(f"<tr{hit}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = ("step", "run", "loss", "gradient norm", "learning rate", "loss scale", "applied", "sample ids (sha256)")
    return _table([f"<th>{name}</th>" for name in head], rows)


def _events(pair: Pair) -> str:
    lines = [
        f"<li>step {event['step']}, {text(label)}: {text(event_line(event))}</li>"
        for label, event in pair.divergence.events[:_MAX_EVENTS]
    ]
    return f"<ul class='events'>{''.join(lines)}</ul>" if lines else ""


def _measures(comparison: Comparison) -> str:
    head = ["<th></th>", *(f"<th>{text(run.label)}</th>" for run in comparison.runs)]
    return _table(head, [_measure(row) for row in comparison.measures], sticky=True)


def _measure(row: Measure) -> str:
    cells = []
    for index, value in enumerate(row.values):
        look = "best" * (index in row.best) or "text" * (row.kind == "text")
        cells.append(
            f"<td class='{look}'>{text(format_measure(row.kind, value))}{_change(row, value) if index else ''}</td>"
        )
    return f"<tr><th>{text(row.title)}</th>{''.join(cells)}</tr>"


def _change(row: Measure, value: float | str) -> str:
    """Relative change from the baseline's value, marked as better or worse; empty where there is none."""
    base = row.values[0]
    if not row.better or isinstance(value, str) or isinstance(base, str) or value == base or not base:
        return ""
    share = value / base - 1
    if not math.isfinite(share) or abs(share) < 0.0005:
        return ""
    better = (value < base) == (row.better == "lower")
    return f' <span class="{"up" if better else "down"}">{share:+.1%}</span>'


def _differences(comparison: Comparison) -> str:
    head = ["<th></th>", "<th></th>", *(f"<th>{text(run.label)}</th>" for run in comparison.runs)]
    rows = [_difference(item) for item in comparison.differences]
    return _table(head, rows, sticky=True) if rows else "<p>Nothing recorded.</p>"


def _difference(item: Difference) -> str:
    cells = "".join(
        f"<td{'' if value == item.values[0] else ' class=other'}>{text(format_value(value))}</td>"
        for value in item.values
    )
    return f"<tr><td class='dim'>{item.group}</td><th><code>{text(item.key)}</code></th>{cells}</tr>"


def _table(head: list[str], rows: list[str], *, sticky: bool = False) -> str:
    kind = " class='sticky'" if sticky else ""
    top = f"<thead><tr>{''.join(head)}</tr></thead>"
    return f"<div class='scroll'><table{kind}>{top}<tbody>{''.join(rows)}</tbody></table></div>"
