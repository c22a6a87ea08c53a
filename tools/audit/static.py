"""Audits the configs of a run that another trainer starts, without training: which defects of known.yaml it hits, what
was measured as sound, what never was, and which dtype everything has.

A condition in known.yaml is a value, a list of which any may be, or text that opens with >, <, >=, <= or !=.
"""

from __future__ import annotations

import argparse
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from config.cli import REPOSITORY
from config.deepspeed.combinations import SETTINGS, Combination, scalar
from config.deepspeed.document import leaves, unknown_keys
from config.deepspeed.keys import DTYPES, REFUSED
from tools.audit.given import ABSENT, NAMES, Given, read_data
from tools.audit.report import finish

MATRIX, MEASURED_WITH = "docs/precision-matrix.md", "0.19.8"
"""The precision matrix, and the DeepSpeed that it was measured with."""
SEVERITIES = ("stops", "wrong", "risk", "note")
"""The severities in order. stops, wrong: whoever hits it does not train, or trains wrongly. risk: wrong under a
condition that no config shows, or a race. note: right but for what it says."""
BAD = SEVERITIES[:2]
_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "!=": operator.ne}
_COMPARISON = re.compile(r"(>=|<=|!=|>|<) *(\S+)$")
_ELSEWHERE = re.compile(f"({'|'.join(NAMES['no_numerics'])})$")


def audit_configs(given: Given, options: argparse.Namespace) -> int:
    """Report on a run's configs; returns the exit code."""
    known, facts = read_known(), given.facts
    found = [finding for entry in known if (finding := find(entry, given)) is not None]
    certain = [finding for finding in found if not finding["why"]]
    possible = [finding for finding in found if finding["why"] and finding["severity"] in BAD]
    wrong = sum(finding["severity"] in BAD for finding in certain)
    may_be = f"; {len(possible)} may be, see what is open" if possible else ""
    report: dict[str, Any] = {
        "verdict": f"wrong; defects hit: {wrong}" if wrong else f"nothing known to be wrong{may_be}"
    }
    report |= {"sources": given.sources, "facts": facts, "versions": given.versions}
    report |= {"findings": certain, "possible": possible, "numerics": list(numerics(given))}
    report |= {"measured_as_sound": list(sound(given)), "never_measured": list(never_measured(given, known))}
    head = f"{', '.join(given.sources)}: ZeRO-{facts['stage']}, {(facts['dtype'] or 'dtype open').upper()}, optimizer "
    head += f"{facts['optimizer']}, accumulation {facts['accumulation'] or 'open'}, trainer {facts['trainer']}\n"
    head += ", ".join(f"{package} {version}" for package, version in given.versions.items() if version)
    sections = {
        "May be wrong": [f"{each['says']} [{each['id']}]: {each['why']}" for each in possible],
        "Notes": [f"{each['says']} [{each['id']}]" for each in certain if each["severity"] == "note"],
        f"Measured as sound: bare DeepSpeed {MEASURED_WITH} on CPUs": report["measured_as_sound"],
        "Never measured": report["never_measured"],
        "Numerics": report["numerics"],
    }
    told = [finding for finding in certain if finding["severity"] != "note"]
    return finish(options, report, head, told, sections)


def numerics(given: Given) -> Iterator[str]:
    """Dtypes in which things are computed, kept, summed and reduced; loss scale and clipping."""
    for name, (fact, *keys) in NAMES["numerics"].items():
        value = given.facts[fact]
        text = "open (auto)" if value is None else scalar(value)
        default = "".join(f" ({key} is not set)" for key in keys if given.fact(f"json.{key}") == ABSENT)
        yield f"{name}: {text.upper() if text in DTYPES.split('|') else text}{default}"


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
    values, release = dict(leaves(given.document)), given.versions["deepspeed"]
    told = {name.removeprefix("json.") for entry in known for name in entry["when"]}
    for key, value in values.items():
        section, stage = key.rpartition(".")[0], given.facts["stage"]
        off = values.get(f"{section}.enabled") is False or values.get(f"{section}.disable") is True
        refused = any(f"{key}.".startswith(f"{name}.") for name in REFUSED if not _ELSEWHERE.match(name))
        refused |= any(row.in_json and row.key == key and row.refuses(value, stage) for row in SETTINGS)
        if refused and not off and key not in told and value not in (None, False, 0, "auto", "none"):
            yield f"{key} = {scalar(value)}"
    yield from (f"{key}: DeepSpeed {MEASURED_WITH} has no such key" for key in unknown_keys(Path(), given.document))
    optimizers = [["adamw", "lion", "sgd"], *(entry["when"].get("optimizer", []) for entry in known)]
    if not any(holds(names, given.facts["optimizer"]) for names in optimizers):
        yield f"optimizer {given.facts['optimizer']}"
    if release not in (MEASURED_WITH, None):
        yield f"all of the precision matrix with DeepSpeed {release}: it is of {MEASURED_WITH}"


def read_known() -> list[dict[str, Any]]:
    """The entries, most severe first."""
    return sorted(read_data("known.yaml"), key=lambda entry: SEVERITIES.index(entry["severity"]))


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
    for name, wanted in (entry.get("versions", {}) | entry["when"]).items():
        if name in given.versions and given.versions[name]:
            answer: bool | None = SpecifierSet(wanted).contains(str(given.versions[name]), prereleases=True)
        else:
            answer = holds(wanted, given.fact(name))
        if answer is False:
            return None
        if answer is None:
            text = " or ".join(map(str, wanted)) if isinstance(wanted, list) else str(wanted)
            key = name.removeprefix("json.") if "." in name else name.replace("_", " ")
            open_.append(f"{key} is {text.lower()}")
    tried, version = entry.get("tried"), given.versions["deepspeed"]
    why = "if " + " and ".join(open_) if open_ else ""
    if not why and tried and version and not Version(tried[0]) <= Version(version) <= Version(tried[-1]):
        why = f"measured with DeepSpeed {' to '.join(tried)}, not with {version}"
    found = {name: entry.get(name) for name in ("id", "severity", "says", "thread", "instead")} | {"why": why}
    measured = entry["measured"]
    return found | {"measured": f"{measured['figure']} ({measured['command']})" if measured else "not here"}
