"""Contents of the page of one run: its state, curves, heat maps, incidents and report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tracking.compare.html import run_data
from tracking.console import duration, gib, human
from tracking.events import describe_event
from tracking.heatmap.grid import Heat
from tracking.heatmap.modules import FOLDS, Fold
from tracking.heatmap.page import panel_data, panels_of
from tracking.heatmap.panels import PANELS
from tracking.report.context import MeasureContext
from tracking.report.measures import all_measures, caveats, read_run
from tracking.run_facts import RunFacts
from tracking.serve.library import Entry
from tracking.serve.overview import scale_text
from tracking.summary import Summary

_MOST_INCIDENTS = 200
_MOST_OPEN = 50


@dataclass(frozen=True)
class State:
    """State of a run for people."""

    facts: list[tuple[str, str]]
    done: float
    """[fraction] Share of the planned steps."""


def state(entry: Entry, *, now: float) -> State:
    """The head of the page. now: seconds since the epoch."""
    last, start = entry.skim.last, entry.skim.start
    step, planned = entry.status.step, entry.planned
    seconds = last.get("step_seconds")
    running = not entry.status.over
    eta = (planned - step) * seconds if running and planned and seconds and step < planned else None
    finite = [loss for _, loss in entry.skim.losses if math.isfinite(loss)]
    evaluated = entry.skim.evals[-1] if entry.skim.evals else None
    skipped = int(last.get("skipped_total") or 0)
    since = entry.status.since
    rows = [
        ("warnings", f"{entry.verdict.warnings:,}" if entry.verdict.warnings else ""),
        ("exit code", str(entry.status.exit_code) if entry.status.exit_code else ""),
        ("speed", f"{human(last['tokens_per_second'])} tokens/s" if last.get("tokens_per_second") else ""),
        ("ETA", duration(eta) if eta is not None else ""),
        ("step", f"{step:,}" + (f" of {planned:,}" if planned else "")),
        ("loss", f"{finite[0]:.4f} \u2192 {finite[-1]:.4f}" if finite else ""),
        ("validation", f"{evaluated['loss']:.4f} at step {evaluated['step']:,}" if evaluated else ""),
        ("skipped", f"{skipped:,}" + (f" ({skipped / step:.2%})" if skipped and step else "") if last else ""),
        ("loss scale", scale_text(float(last.get("loss_scale") or math.nan))),
        ("tokens", human(last["tokens"]) if last else ""),
        ("memory", gib(last.get("memory_bytes"))),
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
    """The curves for charts.js, a few thousand points at most, and the incidents, as plain values."""
    return {"drawn": run_data(run), "incidents": incidents(run), "steps": len(run.columns)}


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
                "verdict": event["verdict"],
                "reason": event["reason"],
                "causes": causes.get(event["step"], [])[:5],
                "replay": event["replay"] or "",
            }
        )
    return found


def heat(found: Heat, panel: str, fold: str, opened: Sequence[str]) -> dict[str, Any]:
    """One panel as plain values; or, without one, which panels there are and what stands out in each.

    Raises ValueError for a panel without values.
    """
    if not panel:
        return {"panels": panels_of(found), "measured": found.measured, "rows": len(found.rows)}
    if panel not in PANELS or not found or not found.has(panel):
        raise ValueError("nothing was measured for this panel")
    chosen: Fold = next((name for name in FOLDS if name == fold), "kinds")
    return panel_data(found, panel, chosen, opened[:_MOST_OPEN])


def report(entry: Entry) -> str:
    """The report as a page. Raises UserError as `tracking.report` does."""
    from tracking.report.html import run_page

    context = MeasureContext(read_run(entry.folder))
    return run_page(context.run.facts, Summary(context.run.facts), all_measures(context), caveats(context))
