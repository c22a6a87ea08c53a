"""The page of one run, shown by the server and written as one file by `tracking.report --html`.

`report/body.html` defines the order of its parts.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from config.load import to_dict
from config.redact import redact
from config.schema import Config
from tracking.compare.curves import plain_list
from tracking.compare.differences import flat, format_value
from tracking.compare.html import run_data
from tracking.events import Event, computes_in, describe_event
from tracking.figures import FIGURES, followed
from tracking.heatmap.grid import Heat
from tracking.heatmap.modules import FOLDS, Fold
from tracking.heatmap.page import panel_data, panels_of, static_heat
from tracking.heatmap.panels import PANELS
from tracking.numbers import duration, human, loss, mib, number, percent
from tracking.pages.document import PARSER, Renderer
from tracking.pages.markdown import fenced
from tracking.pages.render import render
from tracking.report.context import MeasureContext, find
from tracking.report.log import last_lines, log_files, newest_events
from tracking.report.measures import all_measures, caveats, count_verdicts, utilisation
from tracking.report.page import sections as report_sections
from tracking.run_dir import RunDir
from tracking.run_facts import RunFacts
from tracking.serve.library import Entry, Library, is_inside, read_entry
from tracking.serve.overview import scale_text

_MOST_INCIDENTS = 200
_MOST_OPEN = 50
_LONGEST = 300  # maximum characters of a setting
_MARKS = {"fail": "✗ fail", "pass": "✓ pass", "not measured": "not measured"}
"""Verdict to its mark, in page order."""


def state(entry: Entry, *, now: float) -> dict[str, Any]:
    """Header of the page: (name, value) `facts`, and the share of steps `done`. now: seconds since the epoch."""
    last, start = entry.facts.newest, entry.facts.start
    step, planned = entry.status.step, entry.planned
    seconds = last.get("step_seconds")
    running = not entry.status.over
    eta = (planned - step) * seconds if running and planned and seconds and step < planned else None
    course = entry.curve[:, 1]
    metrics = last.get("metrics") or {}
    spread = "".join(f" \u00b1 {number(metrics[figure.spread], 2)}" for figure in FIGURES if figure.spread in metrics)
    evaluated = entry.facts.rare_events.get("eval", [{}])[-1]
    skipped = int(last.get("skipped_total") or 0)
    since = entry.status.since
    rows = [
        (entry.followed, f"{loss(course[0])} \u2192 {loss(entry.newest)}{spread}" if len(course) else ""),
        ("validation", f"{loss(followed(evaluated)[1])} at step {evaluated['step']:,}" if evaluated else ""),
        ("warnings", f"{entry.verdict.warnings:,}" if entry.verdict.warnings else ""),
        ("exit code", str(entry.status.exit_code) if entry.status.exit_code else ""),
        ("speed", f"{human(last['tokens_per_second'])} tokens/s" if last.get("tokens_per_second") else ""),
        ("ETA", duration(eta) if eta is not None else ""),
        ("step", f"{step:,}" + (f" of {planned:,}" if planned else "")),
        ("skipped", f"{skipped:,}" + (f" ({percent(skipped / step, 3)})" if skipped and step else "") if last else ""),
        ("loss scale", scale_text(float(last.get("loss_scale") or math.nan))),
        ("tokens", human(last["tokens"]) if last else ""),
        ("memory", mib(last.get("memory_bytes"))),
        ("computes in", "+".join(computes_in(start))),
        ("ZeRO", f"stage {start['zero_stage']}" if start else ""),
        ("ranks", str(start["world_size"]) if start else ""),
        ("parameters", human(start["parameters"]) if start else ""),
        ("since" if running else "ended", f"{duration(max(0.0, now - since))} ago" if since else ""),
    ]
    done = min(1.0, step / planned) if planned else 0.0
    return {"facts": [(name, value) for name, value in rows if value], "done": done}


def fragment(markdown: str) -> Markup:
    """HTML of a piece of Markdown, without pictures."""
    return Markup(Renderer(Path()).render(PARSER.parse(markdown), PARSER.options, {}))


def changes(own: Entry, entries: Sequence[Entry], *, baseline: Entry | None = None) -> dict[str, Any]:
    """How a run's settings differ from a `baseline`: `rows` of (setting, the baseline's value, the run's value), and
    `about`, which baseline it is. baseline: overrides the default.

    By default it is the first sound run with the same model, data and task. If there is no other run with these, the
    sound run of the same task with the fewest differing settings stands in.
    """
    if not own.settings:
        return {"baseline": None, "rows": [], "about": "its config.yaml is missing or cannot be read"}
    others = [entry for entry in entries if entry.key != own.key and entry.settings]
    group = [entry for entry in others if _work(entry) == _work(own)]
    sound = [entry for entry in [*group, own] if entry.verdict.tone != "bad"] or [*group, own]
    base, why = min(sound, key=_began), f"the first sound run of {len(group) + 1} with the same model, data and task"
    if not group:
        alike = (entry for entry in others if entry.settings.get("task") == own.settings.get("task"))
        sound = [entry for entry in alike if entry.verdict.tone != "bad"]
        base = min(sound, key=lambda entry: (len(_differing(own, entry)), _began(entry)), default=own)
        why = "the nearest sound run of this task; no other has the same model and data"
    if baseline is not None:
        base, why = baseline, "the baseline that was given"
    if base is own:
        about = f"it is the baseline: {why}" if group else "there is no other run of this task to compare it with"
        return {"baseline": None, "rows": [], "about": about}
    keys = _differing(own, base)
    rows = [(key, _setting(base.settings.get(key)), _setting(own.settings.get(key))) for key in keys]
    return {"baseline": base, "rows": rows, "about": why if rows else f"nothing; {why}"}


def _work(entry: Entry) -> dict[str, Any]:
    """Settings that all runs of a group have in common: model, data and task."""
    return {key: value for key, value in entry.settings.items() if key == "task" or key.startswith(("model.", "data."))}


def _began(entry: Entry) -> float:
    return float(entry.facts.evidence.start.get("time", math.inf))


def _differing(one: Entry, other: Entry) -> list[str]:
    keys = dict.fromkeys([*one.settings, *other.settings])
    return [key for key in keys if one.settings.get(key) != other.settings.get(key)]


def _setting(value: Any) -> str:
    text = json.dumps(value, default=str) if isinstance(value, list | dict) else format_value(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def curves(run: RunFacts) -> dict[str, Any]:
    """Curves for charts.js as plain values, a few thousand points at most."""
    drawn = run_data(run)
    share = find(utilisation, MeasureContext(run)).value if run.start else None
    if share is not None:
        factor = 100 * share / run.device_speed
        for part in (drawn["runs"][0]["curve"], drawn["runs"][0]["means"]):
            speeds = np.array(part["tokens_per_second"], float) / run.world_size_at(np.array(part["step"]))
            part["utilisation"] = plain_list(factor * speeds)
    return drawn


def incidents(run: RunFacts) -> list[dict[str, Any]]:
    """Everything that a verdict counts as a warning, newest first; incidents with the attempt's non-finite tensors."""
    found, causes = [], defaultdict[int, list[Event]](list)
    for event in run.rare_events.get("nonfinite", []):
        causes[event["step"]].append(event)
    # Only after one of these can a step be attempted again.
    repeats = [event["time"] for event in run.rare_events.get("run_start", [])]
    repeats += [event["time"] for event in run.warnings if event.get("rolled_back_to")]
    for event in sorted(run.warnings, key=lambda event: (-event["step"], -event["time"]))[:_MOST_INCIDENTS]:
        incident = event["event"] == "incident"
        began = max((time for time in repeats if time < event["time"]), default=0.0)
        own = [cause for cause in causes[event["step"]] if began < cause["time"] <= event["time"]]
        what, _, reason = (event["text"] if event["event"] == "note" else describe_event(event)).partition(": ")
        found.append(
            {
                "step": event["step"],
                "tone": "" if incident else "warned",
                "what": f"{what}:" if reason else what,
                "reason": reason,
                "causes": [describe_event(cause) for cause in own[:5]] if incident else [],
                "replay": event.get("replay") or "",
            }
        )
    return found


def heat(found: Heat, panel: str, fold: str, opened: Sequence[str]) -> dict[str, Any]:
    """One panel as plain values, or the list of panels and what stands out in each if `panel` is empty.

    Raises ValueError for a panel without values.
    """
    if not panel:
        return {"panels": panels_of(found), "measured": found.measured, "rows": len(found.rows)}
    if panel not in PANELS or not found or not found.has(panel):
        raise ValueError("nothing was measured for this panel")
    chosen: Fold = next((name for name in FOLDS if name == fold), "kinds")
    return panel_data(found, panel, chosen, opened[:_MOST_OPEN])


def sections(context: MeasureContext, *, root: Path) -> dict[str, Any]:
    """Values for `report/sections.html`, below the curves and layers. root: logs outside of it are not shown."""
    facts, findings = context.run, all_measures(context)
    run_dir, newest = RunDir(Path(facts.source)), newest_events(facts)
    return {
        "incidents": incidents(facts),
        "findings": sorted(findings, key=lambda item: [*_MARKS].index(item.verdict)),
        "counted": count_verdicts(findings),
        "remarks": caveats(context),
        "marks": _MARKS,
        "sections": report_sections(facts),
        "config": _config(facts.config),
        "environment": [
            (key, _setting(value))
            for name, tree in (("", facts.environment), ("ds_config", facts.deepspeed))
            for key, value in flat(redact(tree), name)
            if key not in ("ledger", "git.commit", "git.dirty") and value not in (None, "")
        ],
        "fragment": fragment,
        "logs": [
            *((path.name, fenced(last_lines(path))) for path in log_files(run_dir) if is_inside(path, root)),
            ("the newest events", fenced("\n".join(f"step {event['step']}: {text}" for event, text in newest))),
        ],
    }


def _config(config: dict[str, Any]) -> list[dict[str, Any]]:
    """All settings, non-default ones first, each with its default if it differs."""
    defaults, found = dict(flat(to_dict(Config()))), []
    for key, value in flat(redact(config)):
        changed = defaults.get(key) != value
        known = f"default {_setting(defaults[key])}" if changed and defaults.get(key) not in (None, "") else ""
        found.append({"key": key, "value": _setting(value), "default": known, "changed": changed})
    return sorted(found, key=lambda item: not item["changed"])


def whole(entry: Entry, changed: dict[str, Any], context: MeasureContext, *, root: Path) -> str:
    """The page as one HTML file. root: as for `sections`."""
    return render(
        "report/run.html",
        title=entry.key,
        entry=entry,
        state=state(entry, now=time.time()),
        changes=changed,
        data=curves(context.run) if len(context.run.columns) else None,
        heat=static_heat(context.run.heat),
        **sections(context, root=root),
    )


def printed(context: MeasureContext) -> str:
    """The page of a run folder as one HTML file. Raises UserError or OSError if it cannot be read."""
    folder, *others = (Path(run.source).resolve() for run in (context.run, context.baseline) if run)
    own, baseline = read_entry(folder), read_entry(others[0]) if others else None
    beside = Library(folder.parent, depth=1)
    if baseline is None:
        beside.look()
    changed = changes(own, beside.entries(), baseline=baseline)
    return whole(own, changed, context, root=Path(folder.anchor))
