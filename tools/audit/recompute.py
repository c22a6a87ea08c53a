"""The audit of a probe's folder: its steps recomputed in plain torch, and what is wrong, as text, JSON and a page."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from config.cli import DIVERGED, DONE
from config.errors import UserError
from config.files import write_atomically
from tools.audit.gradients import NotRecomputed, Objective, labelled, load_model, preferred
from tools.audit.judge import Judged, judge
from tools.audit.recorded import Recorded, read
from tracking.pages.document import Tone, document
from tracking.pages.markdown import Table, code, page, section, text


def add_options(parser: argparse.ArgumentParser) -> None:
    """The option that only `audit_folder` reads; it reads `model`, `page` and `json`, too."""
    parser.add_argument("--reference", metavar="MODEL", help="DPO's reference, where it is not the policy of step 1")


def audit_folder(folder: Path, arguments: argparse.Namespace) -> int:
    """Print the report of a probe's folder. 0: nothing is wrong; 3: something is. Raises UserError for bad input."""
    for path in (arguments.page, arguments.json):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path}: the folder {path.parent} is not there; make it first")
    recorded = read(folder)
    judged = _judged(recorded, arguments.model, arguments.reference)
    report = _report(recorded, judged)
    print("\n".join(_lines(report)))
    if arguments.json is not None:
        write_atomically(arguments.json, json.dumps(report, indent=1).encode())
    if arguments.page is not None:
        tone: Tone = "bad" if report["findings"] else "warn" if report["not_checked"] else "good"
        write_atomically(arguments.page, document(_markdown(report), arguments.page.parent, tone=tone).encode())
    return DIVERGED if report["findings"] else DONE


def _judged(recorded: Recorded, source: str | None, reference: str | None) -> Judged:
    objective: Objective | None = None
    model = stored = None
    why = "the model drops values by chance" if recorded.facts["dropout"] else ""
    try:
        model = load_model(recorded, source)
        if source is not None:
            stored = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        objective = labelled
        if "DPO" in recorded.trainer.get("class", ""):
            objective = preferred(_reference(recorded, model, reference), float(recorded.trainer["beta"]))
    except NotRecomputed as error:
        why = why or str(error)
    judged = judge(recorded, model, None if why else objective, stored)
    if why:
        judged.unchecked["gradients and losses"] = why
    return judged


def _reference(recorded: Recorded, model: Any, source: str | None) -> Any:
    if recorded.trainer.get("loss_type") not in (["sigmoid"], "sigmoid"):
        raise NotRecomputed(f"the DPO loss {recorded.trainer.get('loss_type')} is not known here, sigmoid is")
    if source is not None:
        return load_model(recorded, source)
    if recorded.numbers[0] != 1:
        raise NotRecomputed("the reference is not known: record step 1, or give --reference")
    found, first = copy.deepcopy(model), recorded.step(1)
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recorded.facts["compute"], torch.float32)
    before = first.named("before") | first.named("frozen")
    for name, parameter in found.named_parameters():
        parameter.data = before[name].to(low).float()
    return found


def _report(recorded: Recorded, judged: Judged) -> dict[str, Any]:
    facts = recorded.facts
    return {
        "folder": str(recorded.folder),
        "run": {
            key: facts[key] for key in ("model", "stage", "compute", "world", "accumulation", "optimizer", "versions")
        }
        | {"trainer": recorded.trainer.get("class", facts["engine"][0])},
        "verdict": "wrong" if judged.findings else "sound",
        "findings": [dataclasses.asdict(each) | {"steps": steps} for each, steps in judged.merged()],
        "not_checked": judged.unchecked,
        "steps": judged.measured,
    }


def _headline(report: dict[str, Any]) -> str:
    run, steps = report["run"], [row["step"] for row in report["steps"]]
    what = f"{run['trainer']}, {run['model']}, ZeRO-{run['stage']}, {run['compute'].upper()}, {run['world']} ranks"
    count = len(report["findings"])
    told = f"{count} thing{'s are' if count > 1 else ' is'} wrong" if count else "nothing wrong was found"
    return f"{told} in steps {', '.join(map(str, steps))} ({what}, DeepSpeed {run['versions']['deepspeed']})"


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [_headline(report) + ":" * bool(report["findings"])]
    for each in report["findings"]:
        detail = f" ({each['detail']})" if each["detail"] else ""
        lines.append(f"  {each['kind']}: {each['what']}{detail}; steps {', '.join(map(str, each['steps']))}")
    return lines + [f"  not checked: {what}: {why}" for what, why in report["not_checked"].items()]


_COLUMNS = {
    "step": "step",
    "loss": "loss that is trained",
    "exact_loss": "mean over all that counts",
    "gradient_error": "gradient error",
    "noise": "of it the dtype's",
    "norm": "norm reported",
    "exact_norm": "norm of the gradient",
    "factor": "gradient multiplied by",
    "expected_factor": "by the rule",
    "lr_ratio": "rate used over rate set",
    "update_error": "update error",
}


def _markdown(report: dict[str, Any]) -> str:
    found = Table(("kind", "found", "error", "steps", "where it is largest"))
    for each in report["findings"]:
        found.add(
            each["kind"],
            text(each["what"]),
            f"{each['size']:.2g}",
            ", ".join(map(str, each["steps"])),
            text(each["detail"]),
        )
    rows = [[row.get(key) for key in _COLUMNS] for row in report["steps"]]
    measured = Table(
        list(_COLUMNS.values()),
        ([f"{cell:.5g}" if isinstance(cell, float) else cell or "-" for cell in row] for row in rows),
    )
    headline = _headline(report)
    return page(
        f"# Audit of {text(report['folder'])}",
        f"**{text(headline[0].upper() + headline[1:])}.**",
        section("Findings, the gravest first", str(found) if found else ""),
        section("Measured", str(measured)),
        section("Not checked", [f"{text(what)}: {text(why)}" for what, why in report["not_checked"].items()]),
        section("Run", [f"{text(key)}: {code(value)}" for key, value in report["run"].items()]),
    )
