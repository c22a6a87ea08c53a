"""The audit of a probe's folder: its steps recomputed in plain torch, and what is wrong, as text, JSON and a page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from config.cli import DIVERGED, DONE
from tools.audit.gradients import NotRecomputed, labelled, load_model, preferred
from tools.audit.judge import Judged, judge
from tools.audit.recorded import Recorded, read
from tools.audit.report import show, write
from tracking.jsonl import plain
from tracking.pages.document import document
from tracking.pages.markdown import Table, code, page, section, text

_SHOWN = "step trained_loss mean_loss gradient_error dtype_error reported_norm gradient_norm factor factor_by_rule"
_SHOWN += " rate_ratio update_error"
"""Figures of a step that the page has."""


def audit_folder(folder: Path, arguments: argparse.Namespace) -> int:
    """Print the report of a probe's folder. 0: nothing is wrong; 3: something is. Raises UserError for bad input."""
    recorded = read(folder)
    judged = _judged(recorded, arguments.model, arguments.reference)
    run = {key: recorded.facts[key] for key in ("model", "stage", "compute", "world", "accumulation", "optimizer")}
    run |= {"trainer": recorded.facts["trainer"].get("class", recorded.facts["engine"])} | recorded.facts["versions"]
    wrong = sum(each["severity"] == "wrong" for each in judged.findings)
    verdict = "wrong" if wrong else "sound"
    report = {"folder": str(folder), "run": run, "verdict": verdict, "findings": judged.findings}
    report |= {"not_checked": judged.unchecked, "steps": judged.measured}
    what = f"{run['trainer']}, {run['model']}, ZeRO-{run['stage']}, {run['compute'].upper()}, {run['world']} ranks"
    told = f"{wrong} thing{'s are' if wrong > 1 else ' is'} wrong" if wrong else "nothing wrong was found"
    steps = ", ".join(str(row["step"]) for row in judged.measured)
    head = f"{told} in steps {steps} ({what}, DeepSpeed {run['deepspeed']})"
    write("--json", arguments.json, json.dumps(plain(report), indent=1).encode())
    tone: Any = "bad" if wrong else "warn" if judged.unchecked else "good"
    write("--page", arguments.page, document(_page(report, head), folder, tone=tone).encode())
    unchecked = [f"{what}: {why}" for what, why in judged.unchecked.items()]
    show([head], [_told(finding) for finding in judged.findings], {"Not checked": unchecked})
    return DIVERGED if wrong else DONE


def _judged(recorded: Recorded, source: str | None, reference: str | None) -> Judged:
    model = stored = objective = None
    why = "the model drops values by chance" if recorded.facts["dropout"] else ""
    try:
        model = load_model(recorded, source)
        if source is not None:
            stored = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        pairs = "DPO" in recorded.facts["trainer"].get("class", "")
        objective = preferred(model, recorded, reference) if pairs else labelled
    except NotRecomputed as error:
        why = why or str(error)
    judged = judge(recorded, model, None if why else objective, stored)
    if why:
        judged.unchecked["gradients and losses"] = why
    return judged


def _told(finding: dict[str, Any]) -> tuple[str, dict[str, str]]:
    steps = ", ".join(map(str, finding["steps"]))
    named = {"measured": finding["detail"], "steps": steps, "instead": finding["instead"]}
    return f"{finding['severity'].upper()}, {finding['kind']}: {finding['what']} [{finding['id']}]", named


def _page(report: dict[str, Any], head: str) -> str:
    found = Table(("severity", "found", "error", "where it is largest", "steps", "instead"))
    for each in report["findings"]:
        steps, told = ", ".join(map(str, each["steps"])), (text(each["detail"]), f"{each['size']:.2g}")
        kind = f"{each['severity']}, {each['kind']}"
        found.add(kind, text(each["what"]), told[1], told[0], steps, text(each["instead"]))
    cells = [[row.get(name) for name in _SHOWN.split()] for row in report["steps"]]
    rows = ([f"{cell:.5g}" if isinstance(cell, float) else cell or "-" for cell in row] for row in cells)
    return page(
        f"# Audit of {text(report['folder'])}",
        f"**{text(head[0].upper() + head[1:])}.**",
        section("Findings, the gravest first", str(found) if found else ""),
        section("Measured", str(Table([name.replace("_", " ") for name in _SHOWN.split()], rows))),
        section("Not checked", [f"{text(what)}: {text(why)}" for what, why in report["not_checked"].items()]),
        section("Run", [f"{text(key)}: {code(value)}" for key, value in report["run"].items()]),
    )
