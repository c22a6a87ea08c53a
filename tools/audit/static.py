"""Audits the configs of a run that another trainer starts, without training: which defects of known.yaml it hits, what
was measured as sound, what never was, and which dtype everything has.

A condition in known.yaml is a value, a list of which any may be, or text that opens with >, <, >=, <= or !=.
"""

from __future__ import annotations

import json
import operator
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from config import yaml_text
from config.cli import DIVERGED, DONE, REPOSITORY
from config.deepspeed.combinations import SETTINGS, Combination, scalar
from config.deepspeed.document import leaves, unknown_keys
from config.deepspeed.keys import REFUSED
from config.errors import UserError
from config.files import write_atomically
from tools.audit.given import ABSENT, Given

MATRIX, MEASURED_WITH = "docs/precision-matrix.md", "0.19.8"
"""The precision matrix, and the DeepSpeed that it was measured with."""
SEVERITIES = ("stops", "wrong", "risk", "note")
"""The severities in order. stops, wrong: whoever hits it does not train, or trains wrongly. risk: wrong under a
condition that no config shows, or a race. note: right but for what it says."""
BAD = SEVERITIES[:2]
_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "!=": operator.ne}
_COMPARISON = re.compile(r"(>=|<=|!=|>|<) *(\S+)$")
_ELSEWHERE = re.compile(
    r"(optimizer|scheduler|torch_autocast|tensor_parallel|expert_parallel|pipeline|sequence_parallel_size|bfloat16"
    r"|(bf16|fp16)\.\w+_master_weights_and_grads|wandb|autotuning|datastates_ckpt|checkpoint\..*|vocabulary_size"
    r"|seq_parallel_communication_data_type|use_data_before_expert_parallelism|zero_optimization\.(elastic_checkpoint"
    r"|legacy_stage1|cpu_offload.*|stage3_gather_fp16_weights_on_model_save|save_muon_momentum_buffer_in_memory))$"
)
"""Keys that Mantissa refuses, and that a fact stands for here, or that do not touch the numbers."""


def audit_configs(given: Given, json_file: Path | None) -> int:
    """Print the audit, and write it where `json_file` is given. Returns the exit code."""
    known = read_known()
    found = [finding for entry in known if (finding := find(entry, given)) is not None]
    certain = [finding for finding in found if not finding["why"]]
    wrong = sum(finding["severity"] in BAD for finding in certain)
    report = {"verdict": "wrong" if wrong else "nothing known to be wrong", **given._asdict()}
    del report["document"]
    report |= {"numerics": dict(numerics(given)), "findings": certain}
    report["possible"] = [finding for finding in found if finding["why"] and finding["severity"] in BAD]
    report |= {"measured_as_sound": list(sound(given)), "never_measured": list(never_measured(given, known))}
    if json_file is not None:
        try:
            write_atomically(json_file, (json.dumps(report, indent=2) + "\n").encode())
        except OSError as error:
            raise UserError(f"--json {json_file}: cannot be written: {error.strerror or error}") from error
    print("\n".join(_page(report, min(100, max(60, shutil.get_terminal_size((80, 24)).columns)))))
    may_be = f"; {len(report['possible'])} may be, see what is open" if report["possible"] else ""
    print(f"\nverdict: {report['verdict']}{f'; defects hit: {wrong}' if wrong else may_be}")
    return DIVERGED if wrong else DONE


def numerics(given: Given) -> Iterator[tuple[str, str]]:
    """Dtypes in which things are computed, kept, summed and reduced."""
    facts = given.facts
    dtype = facts["dtype"].upper() if facts["dtype"] else "open (auto)"
    yield "weights", dtype + ("" if facts["autocast"] == "none" else f", computing under autocast {facts['autocast']}")
    masters = facts["masters"].upper() + (" in host memory" if "optimizer" in facts["offload"] else "")
    rounded = facts["masters"] == "fp32" and facts["dtype"] in ("bf16", "fp16")
    yield "masters", masters + (f", started from the weights rounded to {dtype}" if rounded else "")
    for does, key in (("summed", "data_types.grad_accum_dtype"), ("reduced", "communication_data_type")):
        default = {ABSENT: f" ({key} is not set)", None: f" ({key} is auto)"}.get(given.fact(f"json.{key}"), "")
        into = facts[f"{does}_in"]
        yield f"gradients {does}", f"in {into.upper() if len(into) == 4 else into}{default}" if into else "open (auto)"
    if facts["dtype"] == "fp16":
        start = "open (auto)" if facts["scale_power"] is None else f"from 2^{facts['scale_power']}"
        yield "loss scale", f"{facts['loss_scale']}, {start}" if facts["loss_scale"] == "dynamic" else "static"
    text = {None: "open (auto)", 0: "off"}.get(facts["clipping"], f"by {facts['clipping']}")
    default = " (the default, gradient_clipping is not set)" if given.fact("json.gradient_clipping") == ABSENT else ""
    yield "clipping", text + default


def sound(given: Given) -> Iterator[str]:
    """Settings of this run that the precision matrix measured bare DeepSpeed to compute right."""
    facts, values = given.facts, dict(leaves(given.document))
    usual = (facts["autocast"], facts["masters"], facts["optimizer"]) == ("none", "fp32", "adamw")
    if facts["dtype"] is None or not usual or given.versions["deepspeed"] not in (MEASURED_WITH, None):
        return
    page = (REPOSITORY / MATRIX).read_text(encoding="utf-8")
    combination = str(Combination("cast", facts["dtype"], facts["stage"], facts["offload"]))
    clipping = "o(?:n|ff)" if facts["clipping"] is None else "on" if facts["clipping"] else "off"
    accumulation = 1 if facts["accumulation"] == 1 else 4
    row = rf"^\| {re.escape(combination)} \| {clipping} \| {accumulation} \|(?:[^|\n]*\|)+? (\S+) \|$"
    errors = re.findall(row, page, re.MULTILINE)
    bound = re.search(rf"(\S+) in {facts['dtype'].upper()}", page)
    if bound and errors and "*" not in "".join(errors):
        sums = "" if facts["summed_in"] == "fp32" else ", summed and reduced in FP32"
        yield f"{combination}{sums}: masters off by {max(errors)}, {bound[1]} allowed ({MATRIX})"
    for setting in SETTINGS:
        measured = setting.in_json and not setting.refused and facts["stage"] in setting.stages
        if measured and facts["dtype"] in setting.computes and values.get(setting.key) == setting.other:
            yield f"{setting.key} = {scalar(setting.other)} ({MATRIX})"


def never_measured(given: Given, known: list[dict[str, Any]]) -> Iterator[str]:
    """Settings that touch the numbers, or may, and were not measured."""
    document, facts = given.document, given.facts
    conditions = [(name.removeprefix("json."), wanted) for entry in known for name, wanted in entry["when"].items()]
    told = {name for name, _ in conditions}
    for key in REFUSED:
        value: Any = document
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        off = isinstance(value, dict) and (value.get("enabled") is False or value.get("disable") is True)
        if value not in (None, False, 0, "auto", "none", {}) and not (off or _ELSEWHERE.match(key) or key in told):
            yield f"{key}{'' if isinstance(value, dict) else f' = {scalar(value)}'}"
    values = dict(leaves(document))
    for row in SETTINGS:
        if row.in_json and row.key in values and row.key not in told and row.refuses(values[row.key], facts["stage"]):
            yield f"{row.key} = {scalar(values[row.key])}"
    yield from (f"{key}: DeepSpeed {MEASURED_WITH} has no such key" for key in unknown_keys(Path(), document))
    optimizers = [
        wanted if isinstance(wanted, list) else [wanted] for name, wanted in conditions if name == "optimizer"
    ]
    if facts["optimizer"] not in sum(optimizers, ["adamw", "lion", "sgd"]):
        yield f"optimizer {facts['optimizer']}"
    if given.versions["deepspeed"] not in (MEASURED_WITH, None):
        yield f"all of the precision matrix with DeepSpeed {given.versions['deepspeed']}: it is of {MEASURED_WITH}"


def _page(report: dict[str, Any], columns: int) -> Iterator[str]:
    """The audit as text."""

    def wrapped(text: str, first: str = "", indent: int | None = None) -> str:
        rest = " " * (len(first) if indent is None else indent)
        return textwrap.fill(
            text, columns, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
        )

    facts = report["facts"]
    parts = [f"ZeRO-{facts['stage']}", (facts["dtype"] or "dtype open").upper(), f"optimizer {facts['optimizer']}"]
    parts += [f"accumulation {facts['accumulation'] or 'open'}", f"trainer {facts['trainer']}"]
    yield wrapped(f"{', '.join(report['sources'])}: {', '.join(parts)}")
    yield wrapped(", ".join(f"{package} {version}" for package, version in report["versions"].items() if version))
    for found in report["findings"]:
        if found["severity"] != "note":
            yield wrapped(f"{found['severity'].upper()}: {found['says']} [{found['id']}]", "\n", 0)
            measured = found["measured"] and f"{found['measured']['figure']} ({found['measured']['command']})"
            named = {"measured": measured or "not here", "thread": found["thread"], "instead": found["instead"]}
            yield from (wrapped(text, f"  {name + ':':<10}", 12) for name, text in named.items() if text)
    possible = [f"{found['says']} [{found['id']}]: {found['why']}" for found in report["possible"]]
    notes = [f"{found['says']} [{found['id']}]" for found in report["findings"] if found["severity"] == "note"]
    sections = {"May be wrong": possible, "Notes": notes}
    sections[f"Measured as sound: bare DeepSpeed {MEASURED_WITH} on CPUs"] = report["measured_as_sound"]
    sections["Never measured"] = report["never_measured"]
    for heading, lines in sections.items():
        yield from ([f"\n{heading}"] if lines else [])
        yield from (wrapped(line, "  - ") for line in lines)
    yield "\nNumerics"
    yield from (wrapped(text, f"  {name:<18}") for name, text in report["numerics"].items())


def read_known() -> list[dict[str, Any]]:
    """The entries, most severe first."""
    entries = yaml_text.parse(Path(__file__).with_name("known.yaml").read_text(encoding="utf-8"))
    return sorted(entries, key=lambda entry: SEVERITIES.index(entry["severity"]))


def holds(wanted: Any, value: Any) -> bool | None:
    """Whether a condition holds for a fact; None where the fact is not known."""
    if value is None:
        return None
    if isinstance(wanted, list):
        return any(holds(one, value) for one in wanted)
    comparison = _COMPARISON.match(wanted) if isinstance(wanted, str) else None
    if comparison is None:
        return bool(value == wanted)
    number = isinstance(value, int | float)
    return value != ABSENT and number and bool(_OPERATORS[comparison[1]](value, float(comparison[2])))


def find(entry: dict[str, Any], given: Given) -> dict[str, Any] | None:
    """The entry for a report, with `why` it is not certain ("": it is); None where it does not apply."""
    open_ = []
    for package, versions in entry.get("versions", {}).items():
        version = given.versions[package]
        if version is None:
            open_.append(f"{package} is {versions} (give --with {package}=VERSION)")
        elif not SpecifierSet(versions).contains(version, prereleases=True):
            return None
    for name, wanted in entry["when"].items():
        answer = holds(wanted, given.fact(name))
        if answer is False:
            return None
        if answer is None:
            text = " or ".join(map(str, wanted)) if isinstance(wanted, list) else str(wanted)
            open_.append(f"{name.replace('_', ' ')} is {text.lower()}")
    tried, version = entry.get("tried"), given.versions["deepspeed"]
    why = "if " + " and ".join(open_) if open_ else ""
    if not why and tried and version and not Version(tried[0]) <= Version(version) <= Version(tried[-1]):
        why = f"measured with DeepSpeed {' to '.join(tried)}, not with {version}"
    kept = {name: entry.get(name) for name in ("id", "severity", "says", "measured", "thread", "instead")}
    return {**kept, "why": why}
