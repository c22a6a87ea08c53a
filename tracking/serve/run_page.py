"""What the page of one run shows: where it stands, curves, heat maps, incidents, and its report."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from config.printable import shown
from tracking.compare.curves import curve, marks, means, plain_list, validation
from tracking.console import duration, human
from tracking.events import describe_event
from tracking.heatmap.grid import Heat
from tracking.heatmap.modules import FOLDS, Fold
from tracking.heatmap.panels import DTYPES, PANELS
from tracking.heatmap.scale import drawn_panels, limits
from tracking.heatmap.words import sentences
from tracking.report.context import LIMITS, MeasureContext
from tracking.report.measures import all_measures, caveats, read_run
from tracking.run_dir import RunDir
from tracking.run_facts import RunFacts
from tracking.serve.library import Entry
from tracking.serve.overview import power
from tracking.summary import summarise

MOST_COLUMNS = 240
"""Columns of a heat map that are sent."""
_MOST_INCIDENTS = 200
_MOST_OPEN = 50


@dataclass(frozen=True)
class State:
    """Where a run stands, in words."""

    facts: list[tuple[str, str]]
    done: float
    """[fraction] Of the planned steps."""


def state(entry: Entry, *, now: float) -> State:
    """The head of the page. now: seconds since the epoch."""
    last, start = entry.skim.last, entry.skim.start
    step, planned = entry.status.step, entry.planned
    seconds = last.get("step_seconds")
    running = entry.status.state == "running"
    eta = (planned - step) * seconds if running and planned and seconds and step < planned else None
    finite = [loss for _, loss in entry.skim.losses if math.isfinite(loss)]
    evaluated = entry.skim.evals[-1] if entry.skim.evals else None
    skipped = int(last.get("skipped_total") or 0)
    since = entry.status.since
    rows = [
        ("speed", f"{human(last['tokens_per_second'])} tokens/s" if last.get("tokens_per_second") else ""),
        ("ETA", duration(eta) if eta is not None else ""),
        ("step", f"{step:,}" + (f" of {planned:,}" if planned else "")),
        ("loss", f"{finite[0]:.4f} \u2192 {finite[-1]:.4f}" if finite else ""),
        ("validation", f"{evaluated['loss']:.4f} at step {evaluated['step']:,}" if evaluated else ""),
        ("skipped", f"{skipped:,}" + (f" ({skipped / step:.2%})" if skipped and step else "") if last else ""),
        ("loss scale", power(float(last.get("loss_scale") or math.nan))),
        ("tokens", human(last["tokens"]) if last else ""),
        ("memory", f"{last['memory_bytes'] / 2**30:.2f} GiB" if last.get("memory_bytes") else ""),
        (
            "computes in",
            "+".join(sorted(set((start.get("regions") or {}).values())) or [str(start.get("compute", ""))]),
        ),
        ("ZeRO", f"stage {start['zero_stage']}, {start['world_size']} ranks" if start else ""),
        ("parameters", human(start["parameters"]) if start else ""),
        ("since" if running else "ended", f"{duration(max(0.0, now - since))} ago" if since else ""),
    ]
    return State([(name, value) for name, value in rows if value], min(1.0, step / planned) if planned else 0.0)


def curves(run: RunFacts) -> dict[str, Any]:
    """What the curves are drawn from, in at most a few thousand points, and the incidents, as plain values."""
    return {
        "curve": curve(run),
        "means": means(run),
        "validation": validation(run),
        "marks": [{**mark, "text": shown(mark["text"])} for mark in marks(run)],
        "incidents": incidents(run),
        "steps": len(run.columns),
    }


def incidents(run: RunFacts) -> list[dict[str, Any]]:
    """The newest incidents, newest first, each with what was not finite at its step."""
    found = []
    causes: dict[int, list[str]] = {}
    for event in run.rare_events.get("nonfinite", []):
        causes.setdefault(event["step"], []).append(describe_event(event))
    for event in reversed(run.rare_events.get("incident", [])[-_MOST_INCIDENTS:]):
        found.append(
            {
                "step": event["step"],
                "verdict": shown(event["verdict"]),
                "reason": shown(event["reason"]),
                "causes": [shown(cause) for cause in causes.get(event["step"], [])[:5]],
                "replay": shown(event["replay"] or ""),
            }
        )
    return found


def heat(found: Heat, panel: str, fold: str, opened: Iterable[str]) -> dict[str, Any]:
    """One panel as plain values; or, without one, which panels there are and what stands out in each.

    values: (rows, columns); on a logarithmic scale log10, None where nothing was measured.
    """
    if not panel:
        lines = sentences(found)
        varying = drawn_panels(found) if lines else []
        panels = [
            {"key": key, "title": PANELS[key].title, "line": shown(line), "varies": key in varying}
            for key, line in lines.items()
        ]
        return {"panels": panels, "measured": found.measured, "rows": len(found.rows)}
    if panel not in PANELS or not found or not found.has(panel):
        raise ValueError("nothing was measured for this panel")
    chosen: Fold = next((name for name in FOLDS if name == fold), "kinds")
    used = found.by_kind(panel) if chosen == "modules" else found.chosen(_known(found, panel))
    folded = used.folded(chosen, list(opened)[:_MOST_OPEN]).narrowed(MOST_COLUMNS)
    how, values = PANELS[panel], folded.panels[panel].astype(float)
    low, high = limits(folded, panel)
    if how.log:
        values = np.log10(np.where(values > 0, values, np.nan))
        low, high = math.log10(low), math.log10(high)
    return {
        "title": how.title,
        "log": how.log,
        "percent": how.percent,
        "codes": list(DTYPES) if panel == "dtype" else [],
        "rows": [shown(name) for name in folded.rows],
        "names": list(folded.rows),
        "edges": folded.edges.tolist(),
        "values": [plain_list(np.round(row, 4)) for row in values],
        "low": low,
        "high": high,
    }


def _known(found: Heat, panel: str) -> list[int]:
    return np.flatnonzero(np.isfinite(found.panels[panel]).any(axis=1)).tolist()


def report(entry: Entry) -> str:
    """The report as a page. Raises UserError as `tracking.report` does."""
    from tracking.report.html import run_page

    run_dir = RunDir(entry.folder)
    context = MeasureContext(read_run(run_dir.path), None, LIMITS, price=None, peak=None, now=time.time())
    return run_page(run_dir, summarise(run_dir), all_measures(context), caveats(context))
