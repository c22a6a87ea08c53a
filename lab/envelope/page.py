"""The results of a stability envelope: envelope.json, .md, .html and .png in the output folder.

A row of envelope.json for each depth [layers], batch [sequences] and label (precision, with the loss-scale policy):
`largest` (learning rate or None), `fp32` and `control` (their largest rates there, or None), `lucky` (rates that passed
above one that failed), `tried` (`lab.envelope.search.Tried` of each rate).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.load import to_yaml
from config.redact import redact_arguments
from lab.envelope.search import CONTROL, Cell
from lab.envelope.trials import TRIALS, Study, device_name, explore_finished, read_trials
from tracking.compare.surviving import read_events
from tracking.environment import environment
from tracking.pages.document import write_document
from tracking.pages.markdown import Table, fenced, page, section, text
from tracking.plots import figure, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
_NO_RATE = "#d9d9d9"
_HEAD = ("precision", "depth", "batch", "largest rate", "of FP32's", "of the control's", "skipped there", "next rate")


def write_results(study: Study, *, command: Sequence[str]) -> list[dict[str, Any]]:
    """Write the finished trials' results; returns the rows of envelope.json. command: for the page. Raises Missing."""
    folder, first = study.folder, study.first()
    cells, used, fingerprint = explore_finished(study)
    labels = ["fp32", *dict.fromkeys(item.label for item in study.settings if item.precision != "fp32")]
    cells.sort(key=lambda cell: (labels.index(cell.setting.label), cell.setting.depth, cell.setting.batch))
    rows = [_row(cell, cells) for cell in cells]
    others = len(read_trials(folder)) - len(used)
    seconds = sum(line["seconds"] for line in read_events(folder / TRIALS) if line["key"] in used)
    facts = environment({})
    versions = [f"{name} {facts['versions'][name]}" for name in ("python", "torch", "deepspeed", "transformers")]
    versions += [f"commit {facts['git']['commit'][:12]}"] if facts["git"] else []
    conditions = {
        "command": shlex.join(redact_arguments(list(command))),
        "data": f"fingerprint {fingerprint}",
        "device": f"{device_name()}, {study.processes} process{'' if study.processes == 1 else 'es'}",
        "versions": ", ".join(versions),
        "trials": f"{len(used)} of {first.config.run.steps} steps, {seconds:,.0f} s in all"
        + (f"; {others} more in {TRIALS} under other conditions or at rates not needed, left out" if others else ""),
    }
    found = {"rates": study.rates, "conditions": conditions, "rows": rows}
    (folder / "envelope.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    title = f"Largest stable learning rate: {first.config.model.architecture or first.config.model.name_or_path}"
    draw_envelope(rows, study.rates, folder / "envelope.png", title=title)
    written = envelope_page(rows, study.rates, conditions, to_yaml(first.config), picture="envelope.png")
    write_document(folder / "envelope.md", written)
    return rows


def _row(cell: Cell, cells: Sequence[Cell]) -> dict[str, Any]:
    here = {each.setting.label: each.largest for each in cells if each.setting.reference == cell.setting.reference}
    found = {"depth": cell.setting.depth, "batch": cell.setting.batch, "label": cell.setting.label}
    found |= {"largest": cell.largest, "fp32": here["fp32"], "control": here.get(CONTROL), "lucky": cell.lucky}
    return found | {"tried": [asdict(item) for item in cell.tried]}


def draw_envelope(rows: Sequence[Row], rates: Sequence[float], png: Path, *, title: str) -> Path:
    """One panel per label: the largest rate by depth and batch.

    rates: all rates of the study, ascending; the range of the colour map. Returns `png`.
    """
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    labels = list(dict.fromkeys(row["label"] for row in rows))
    depths, batches = (sorted({row[key] for row in rows}) for key in ("depth", "batch"))
    norm = LogNorm(min(rates), max(max(rates), 2 * min(rates)))
    colours = matplotlib.colormaps["viridis"].copy()
    width = max(9.0, 2.0 + len(labels) * (0.3 + 1.3 * len(batches)))
    with figure(png, width, 2.4 + 1.05 * len(depths), axes_grid=False) as drawn:
        panels = drawn.subplots(1, len(labels), squeeze=False, sharey=True)[0]
        for axis, label in zip(panels, labels, strict=True):
            mine = [row for row in rows if row["label"] == label]
            _draw_panel(axis, mine, depths, batches, lambda rate: colours(norm(rate)))
            axis.set_title(plain(label))
            axis.set_xlabel("global batch (sequences)")
        panels[0].set_ylabel("depth (layers)")
        drawn.suptitle(plain(title), fontsize=14)
        drawn.colorbar(ScalarMappable(norm, colours), ax=list(panels), label="largest learning rate", shrink=0.9)
    return png


def _draw_panel(axis: Axes, rows: Sequence[Row], depths: Sequence[int], batches: Sequence[int], colour: Any) -> None:
    for row in rows:
        x, y = batches.index(row["batch"]), depths.index(row["depth"])
        face = _NO_RATE if row["largest"] is None else colour(row["largest"])
        axis.fill([x - 0.5, x + 0.5, x + 0.5, x - 0.5], [y - 0.5, y - 0.5, y + 0.5, y + 0.5], color=face, linewidth=0)
        dark = row["largest"] is not None and sum(face[:3]) < 1.3
        text: dict[str, Any] = {"color": "white" if dark else "black", "ha": "center", "va": "center"}
        axis.text(x, y, _rate(row["largest"]), fontsize=13, fontweight="bold", **text)
    axis.set_xlim(-0.5, len(batches) - 0.5)
    axis.set_ylim(-0.5, len(depths) - 0.5)
    axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axis.set_yticks(range(len(depths)), [str(depth) for depth in depths])
    axis.tick_params(length=0)


def envelope_page(
    rows: Sequence[Row], rates: Sequence[float], conditions: Mapping[str, str], config: str, *, picture: str
) -> str:
    """The page in Markdown. conditions: name to value. config: YAML. picture: file name of the heat map."""
    largest = [
        (
            *(row["label"], row["depth"], row["batch"], _rate(row["largest"])),
            *(_ratio(row, "fp32"), _ratio(row, "control"), _skips(row), _next_rate(row)),
        )
        for row in rows
    ]
    failures = [
        (
            *(row["label"], row["depth"], row["batch"], f"{item['rate']:g}", item["step"], text(item["why"])),
            f"{item['skipped']} of {item['steps']}",
        )
        for row in rows
        for item in row["tried"]
        if item["why"]
    ]
    above = [row for row in rows if row["lucky"]]
    lucky = [f"{row['label']}, {row['depth']} layers, batch {row['batch']}: {_listed(row['lucky'])}" for row in above]
    head = ("precision", "depth", "batch", "rate", "divergence step", "why", "skipped")
    return page(
        "# Stability envelope",
        _verdict(rows) or "No precision but FP32 was tried.",
        f"![largest learning rate by depth and batch]({picture})",
        section("Largest learning rate", Table(_HEAD, largest)),
        section(
            "Rates that fail",
            Table(head, failures) or "None of the rates that were tried.",
            "Passed above a rate that failed, which is luck and not counted:" if lucky else "",
            lucky,
        ),
        section(
            "Conditions",
            Table(("what", "value"), [map(text, item) for item in conditions.items()]),
            f"Rates tried, from the smallest up until two in a row fail: {_listed(rates)}. docs/envelope.md says "
            "when a rate passes, by the bounds in `parity:`. The config of the first trial:",
            fenced(config, "yaml"),
        ),
    )


def _verdict(rows: Sequence[Row]) -> list[str]:
    """One line per precision: its worst ratio of largest rates to the control's, or else to FP32's."""
    lines = []
    for label in dict.fromkeys(row["label"] for row in rows if row["label"] not in ("fp32", "control")):
        known = [row for row in rows if row["label"] == label and row["fp32"]]
        stable = [row for row in known if row["largest"] is not None]
        if not stable:
            lines.append(f"**{text(label)}** is stable at no rate that was tried")
            continue
        worst = min(stable, key=lambda row: row["largest"] / row[_reference(row)[0]])
        reference, whose = _reference(worst)
        share = "all" if worst["largest"] == worst[reference] else _ratio(worst, reference)
        exact = f" ({_ratio(worst, 'fp32')} of FP32's)" if reference != "fp32" else ""
        layers = f"{worst['depth']} layer{'' if worst['depth'] == 1 else 's'}"
        none = f"; at none in {len(known) - len(stable)} of {len(known)} places" if len(stable) < len(known) else ""
        lines.append(
            f"**{text(label)}** takes {share} of {whose} largest learning rate at its worst"
            f"{exact}, {worst['largest']:g} with {layers} and batch {worst['batch']}{none}"
        )
    return lines


def _reference(row: Row) -> tuple[str, str]:
    """Key and name of a rate's reference: the control if there is one, which FP32 itself may fail to match."""
    own = row["control"] and row["label"] != "control"
    return ("control", "the control's") if own else ("fp32", "FP32's")


def _next_rate(row: Row) -> str:
    failed = next((item for item in row["tried"] if item["why"]), None)
    if failed:
        return f"{failed['rate']:g} fails at step {failed['step']}"
    if not row["tried"]:
        return "none tried: FP32 fails at all"
    return "all tried passed" if row["label"] == "fp32" else "FP32 fails next"


def _skips(row: Row) -> str:
    at = next((item for item in row["tried"] if item["rate"] == row["largest"]), None)
    return f"{at['skipped']} of {at['steps']}" if at else ""


def _ratio(row: Row, reference: str) -> str:
    return "" if row["largest"] is None or not row[reference] else f"{row['largest'] / row[reference]:.3g}"


def _listed(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def _rate(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:g}"
