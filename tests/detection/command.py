"""Plant defects that the product does not know into small runs, and tabulate what its judge says of each.

    python -m tests.detection [--out docs/detection.md] [--only TEXT] [--folder DIR] [--minutes N]

Runs one cell after the other in two processes that stay up, and appends every result to FOLDER/results.jsonl, so that
an interrupted table resumes where it stopped. The page is written from what is there, and says what is not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from config.cli import Arguments, entry_point
from config.command_line import read_command_line
from data.prepare import prepare
from tests.detection import run
from tests.detection.cells import Cell, all_cells, base, write_documents
from tests.detection.defects import DEFECTS, Defect
from tests.detection.page import page
from tests.support.process_group import ProcessGroup
from tracking.environment import environment

SECONDS = 600.0
"""For one cell, on a machine that others keep busy."""
HALVINGS = 16


def conditions() -> dict[str, Any]:
    """What the page says of where it was measured."""
    machine = environment({})
    return {
        **{name: version(name) for name in ("torch", "deepspeed", "transformers")},
        "machine": f"{machine['cpu']['usable_cores']} cores of {machine['cpu']['model']}",
    }


def results(path: Path) -> dict[str, dict[str, Any]]:
    """The newest result of each cell by its name."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {found["cell"]: found for found in map(json.loads, lines)}


def cell_result(pair: ProcessGroup, folder: Path, cell: Cell, size: float | None = None) -> dict[str, Any]:
    """What was found of one cell. A run that a process refuses is a finding, too, by the line that says why."""
    name = run.twin_name(cell)
    try:
        pair.run(run.twin, folder=str(folder), cell=cell, name=name, seconds=SECONDS)
        found: dict[str, Any] = pair.run(run.run, folder=str(folder), cell=cell, size=size, seconds=SECONDS)[0]
    except AssertionError as problem:
        (folder / "refused.txt").write_text(f"{cell.name}\n{problem}\n", encoding="utf-8")
        line = [text for text in str(problem).splitlines() if text.strip()][-1].strip()
        kind, _, said = line.partition(": ")
        return {
            "found_by": [f"refused: {kind.rpartition('.')[2]}"],
            "said": [said[:300]],
            "modules": [],
            "ranks": [],
            "oracle": "",
        }
    return found


def smallest(pair: ProcessGroup, folder: Path, defect: Defect) -> dict[str, Any]:
    """The smallest size, by halving, of which single steps in BF16 at ZeRO-2 say that something is wrong.

    Of a flipped bit the lowest position, in a whole run.
    """
    cell = Cell(defect.name, "bf16", 2, defect.variant, 0, defect.overrides)
    found, size = None, defect.size
    for _ in range(HALVINGS):
        if defect.unit == "bit":
            judged = cell_result(pair, folder, cell, size)
        else:
            judged = pair.run(run.steps_alone, folder=str(folder), cell=cell, size=size, seconds=SECONDS)[0]
        if not judged["found_by"]:
            break
        found = {"size": size, "found_by": judged["found_by"]}
        if size == 0:
            break
        size = float(size // 2) if defect.unit == "bit" else size / 2
    return {"smallest": found, "not_found": size if found is None or size != found["size"] else None}


def prepare_data(folder: Path) -> None:
    """Tokenize once, here: the ranks are daemons, which may not start workers of their own."""
    if not (folder / "short.jsonl").exists():
        write_documents(folder)
    for variant in ("plain", "documents"):
        prepare(read_command_line([*base(folder, variant)]).config.data, progress=False)


def measure(options: argparse.Namespace) -> None:
    """Every cell that is missing, for as long as there is time."""
    path = options.folder / "results.jsonl"
    known, ends = results(path), time.monotonic() + 60 * options.minutes
    cells = [cell for cell in all_cells() if options.only in cell.name and cell.name not in known]
    sizes = [defect for defect in DEFECTS if defect.halving and "bf16" in defect.paths]
    scalable = [defect for defect in sizes if options.only in defect.name and f"smallest {defect.name}" not in known]
    with ProcessGroup(2) as pair:
        for number, cell in enumerate(cells):
            if time.monotonic() > ends:
                break
            started = time.monotonic()
            found = cell_result(pair, options.folder, cell)
            _append(path, {"cell": cell.name, **found, "seconds": time.monotonic() - started})
            print(f"{number + 1}/{len(cells)} {cell.name}: {', '.join(found['found_by']) or 'nothing'}", flush=True)
        for defect in scalable:
            if time.monotonic() > ends:
                break
            started = time.monotonic()
            found = smallest(pair, options.folder, defect)
            _append(path, {"cell": f"smallest {defect.name}", **found, "seconds": time.monotonic() - started})
            print(f"smallest {defect.name}: {found}", flush=True)


def _append(path: Path, result: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing and write the page."""
    parser = Arguments("python -m tests.detection", __doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/detection/detection.md"), help="the page")
    parser.add_argument("--only", default="", help="only cells whose name has this text; writes no page")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no cell after so many minutes")
    parser.add_argument("--folder", type=Path, default=Path("runs/detection"), help="folder of results and runs")
    options = parser.parse_args(arguments)
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    prepare_data(options.folder)
    measure(options)
    if not options.only:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        found = results(options.folder / "results.jsonl")
        minutes = sum(each["seconds"] for each in found.values()) / 60
        options.out.write_text(page(all_cells(), found, conditions() | {"minutes": minutes}), encoding="utf-8")
        print(f"wrote {options.out}")
    return 0
