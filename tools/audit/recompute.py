"""The audit of a probe's folder: its steps recomputed in plain torch, and what is wrong."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tools.audit.judge import Judge
from tools.audit.recorded import read
from tools.audit.report import finish
from tracking.jsonl import plain


def audit_folder(folder: Path, options: argparse.Namespace) -> int:
    """Report on a probe's folder. 0: nothing is wrong; 3: something is. Raises UserError for bad input."""
    recorded = read(folder)
    judged, facts = Judge(recorded, options.model, options.reference), recorded.facts
    run = {key: facts[key] for key in ("model", "stage", "compute", "world", "accumulation", "optimizer", "versions")}
    run["trainer"] = facts["trainer"].get("class", facts["engine"])
    wrong = sum(each["severity"] == "wrong" for each in judged.findings)
    report = {"folder": str(folder), "run": run, "findings": judged.findings, "not_checked": judged.unchecked}
    report |= {"verdict": f"wrong; findings: {wrong}" if wrong else "sound", "steps": judged.measured}
    head = f"{folder}: {run['trainer']}, {run['model']}, ZeRO-{run['stage']}, {run['compute'].upper()}, "
    head += f"{run['world']} ranks, DeepSpeed {run['versions']['deepspeed']}; steps {_listed(recorded.numbers)}"
    unchecked = [f"{what}: {why}" for what, why in judged.unchecked.items()]
    told = [_told(finding) for finding in judged.findings]
    return finish(options, plain(report), head, told, {"Not checked": unchecked})


def _told(finding: dict[str, Any]) -> tuple[str, dict[str, str]]:
    measured = finding["detail"] or f"{finding['size']:.2g}"
    named = {"measured": measured, "steps": _listed(finding["steps"]), "instead": finding["instead"]}
    return f"{finding['severity'].upper()}: {finding['kind']}: {finding['what']} [{finding['id']}]", named


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
