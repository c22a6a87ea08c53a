"""Markdown pages of results: part-N.md and goals.md."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from lab.gpu_check.goals import goals_table, loss_difference
from lab.gpu_check.items import PARTS, Part
from lab.gpu_check.run import DONE, SKIPPED, Check
from tracking.pages import markdown
from tracking.pages.markdown import Table, code, section, text


def page(check: Check, number: int, part: Part, not_run: Mapping[str, str]) -> str:
    """Content of part-N.md."""
    found = {item.name: check.result(number, item) for item in part.items}
    rows = []
    for item in part.items:
        result = found[item.name]
        if result is None:
            rows.append([code(item.name), text(item.what), "not run", "", text(not_run.get(item.name, ""))])
            continue
        reference = found.get(item.against or "")
        said = list(lines(result["figures"], against=item.against, reference=reference and reference["figures"]))
        if result["status"] == SKIPPED:
            said.append(text(result["error"]))
        elif result["status"] != DONE:
            said.append(f"{text(result['error'])}; {code(result['log'])}")
        for index, line in enumerate(said or [""]):
            head = [code(item.name), text(item.what), text(result["status"]), f"{result['seconds']:.0f}"]
            rows.append([*(head if index == 0 else ["", "", "", ""]), line])
    statuses = [result["status"] for result in found.values() if result is not None]
    done, skipped = statuses.count(DONE), statuses.count(SKIPPED)
    counts = f"{done} of {len(part.items)} items done" + (f", {skipped} skipped" if skipped else "")
    return markdown.page(
        f"# GPU check, part {number}: {part.title}",
        f"{counts}. {text(conditions(check.machine))}.",
        "**A rehearsal**: a model of a few thousand parameters. No figure says anything." if check.tiny else "",
        goals_table(number, found, tiny=check.tiny),
        Table(["item", "what", "outcome", "seconds", "measured"], rows),
    )


def all_goals(check: Check) -> str:
    """Content of goals.md: the goals of all parts, including results of earlier calls."""
    sections = []
    for number, part in PARTS.items():
        results = {item.name: check.result(number, item) for item in part.items}
        sections.append(section(f"Part {number}: {text(part.title)}", goals_table(number, results, tiny=check.tiny)))
    return markdown.page("# GPU check: the goals", f"{text(conditions(check.machine))}.", *sections)


def conditions(machine: Mapping[str, Any]) -> str:
    """Device and versions on one line."""
    named = {"driver": machine["driver"], "CUDA": machine["cuda"]} | machine["versions"]
    commit = (machine["git"] or {}).get("commit", "")[:12]
    said = [machine["device"], *(f"{name} {value}" for name, value in named.items() if value)]
    return ", ".join([*said, *([f"commit {commit}"] if commit else [])])


def lines(
    figures: Mapping[str, Any], *, against: str | None = None, reference: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Markdown lines: an item's own figures on one line, then one line per variant."""
    own = {name: value for name, value in figures.items() if name != "losses" and not isinstance(value, Mapping)}
    said = [f"{text(name)} {words(value)}" for name, value in own.items()]
    if reference is not None and "losses" in reference and "losses" in figures:
        difference = loss_difference(figures["losses"], reference["losses"])
        shown = f"{difference:.1e}" if math.isfinite(difference) else "cannot be compared"
        said.append(f"losses {shown} from those of {code(against)}")
    if said:
        yield ", ".join(said)
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield f"**{text(name)}**: " + ", ".join(f"{text(key)} {words(each)}" for key, each in value.items())


def words(value: object) -> str:
    """A figure as text, with few digits."""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return "; ".join(map(words, value)) or "none"
    return text("-" if value is None else value)
