"""The audit of a probe's folder: its steps recomputed in plain torch, and what is wrong, as text, JSON and a page."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from config.cli import DIVERGED, DONE
from config.errors import UserError
from config.files import write_atomically
from precision.dtypes import DTYPES
from tools.audit.gradients import NotRecomputed, Objective, labelled, load_model, preferred
from tools.audit.judge import Judged, judge
from tools.audit.recorded import Recorded, read
from tracking.pages.document import Tone, document
from tracking.pages.markdown import Table, code, page, section, text


def audit_folder(folder: Path, arguments: argparse.Namespace) -> int:
    """Print the report of a probe's folder. 0: nothing is wrong; 3: something is. Raises UserError for bad input."""
    for path in (arguments.page, arguments.json):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path}: the folder {path.parent} is not there; make it first")
    recorded = read(folder)
    judged = _judged(recorded, arguments.model, arguments.reference)
    facts = recorded.facts
    run = {key: facts[key] for key in ("model", "stage", "compute", "world", "accumulation", "optimizer", "versions")}
    wrong = [each for each in judged.findings if each["severity"] == "wrong"]
    report = {
        "folder": str(folder),
        "run": run | {"trainer": recorded.trainer.get("class", facts["engine"][0])},
        "verdict": "wrong" if wrong else "sound",
        "findings": judged.findings,
        "not_checked": judged.unchecked,
        "steps": judged.measured,
    }
    headline = _headline(report, len(wrong))
    print("\n".join([headline + ":" * bool(judged.findings), *_lines(report)]))
    if arguments.json is not None:
        write_atomically(arguments.json, json.dumps(report, indent=1).encode())
    if arguments.page is not None:
        tone: Tone = "bad" if wrong else "warn" if judged.unchecked else "good"
        write_atomically(arguments.page, document(_markdown(report, headline), folder, tone=tone).encode())
    return DIVERGED if wrong else DONE


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
            objective = preferred(_reference(recorded, model, reference), recorded.trainer)
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
    before = first.named("before") | first.named("frozen")
    for name, parameter in found.named_parameters():
        parameter.data = before[name].to(DTYPES[recorded.facts["compute"]]).float()
    return found


def _headline(report: dict[str, Any], wrong: int) -> str:
    run, steps = report["run"], [row["step"] for row in report["steps"]]
    what = f"{run['trainer']}, {run['model']}, ZeRO-{run['stage']}, {run['compute'].upper()}, {run['world']} ranks"
    told = f"{wrong} thing{'s are' if wrong > 1 else ' is'} wrong" if wrong else "nothing wrong was found"
    return f"{told} in steps {', '.join(map(str, steps))} ({what}, DeepSpeed {run['versions']['deepspeed']})"


def _lines(report: dict[str, Any]) -> Iterator[str]:
    for each in report["findings"]:
        detail = f" ({each['detail']})" if each["detail"] else ""
        yield f"  {_kind(each)}: {each['what']}{detail}; steps {', '.join(map(str, each['steps']))}"
        if each["instead"]:
            yield f"    instead: {each['instead']}"
    yield from (f"  not checked: {what}: {why}" for what, why in report["not_checked"].items())


def _kind(finding: dict[str, Any]) -> str:
    return f"note, {finding['kind']}" if finding["severity"] == "note" else str(finding["kind"])


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


def _markdown(report: dict[str, Any], headline: str) -> str:
    found = Table(("kind", "found", "error", "steps", "where it is largest"))
    for each in report["findings"]:
        steps, told = ", ".join(map(str, each["steps"])), each["instead"] and f"; instead: {each['instead']}"
        found.add(_kind(each), text(each["what"]), f"{each['size']:.2g}", steps, text(each["detail"] + told))
    rows = [[row.get(key) for key in _COLUMNS] for row in report["steps"]]
    cells = ([f"{cell:.5g}" if isinstance(cell, float) else cell or "-" for cell in row] for row in rows)
    versions = " ".join(word for pair in report["run"]["versions"].items() for word in pair)
    run = report["run"] | {"versions": versions}
    return page(
        f"# Audit of {text(report['folder'])}",
        f"**{text(headline[0].upper() + headline[1:])}.**",
        section("Findings, the gravest first", str(found) if found else ""),
        section("Measured", str(Table(list(_COLUMNS.values()), cells))),
        section("Not checked", [f"{text(what)}: {text(why)}" for what, why in report["not_checked"].items()]),
        section("Run", [f"{text(key)}: {code(value)}" for key, value in run.items()]),
    )
