"""Compare every combination of precision, ZeRO stage and offload with plain torch in FP32: the precision matrix.

    python -m lab.matrix [--out docs/precision-matrix.md] [--only TEXT [--into PAGE]] [--processes N] [--steps N]

Starts itself on several processes, runs one cell after the other in them, and appends every result to
FOLDER/results.jsonl, so that an interrupted matrix resumes where it stopped. The page is written once every cell is
measured; --into replaces those sections of an earlier page whose cells were all measured. Exit code 0: every cell is as
config/deepspeed/combinations.py expects; 3: some are not; 2: not possible.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config.cli import Arguments, entry_point
from config.errors import UserError
from config.options import positive_int
from lab.detection.made_of import made_of, measured_on
from lab.matrix.cells import Cell, all_cells
from lab.matrix.page import page, unexpected, updated
from lab.results import keep_result, read_results
from launch.job import add_processes_option, default_processes, error_line_of, launch
from tracking.environment import environment

AS_EXPECTED, UNEXPECTED = 0, 3
_HANG_MINUTES = 5.0


def conditions(processes: int, steps: int) -> dict[str, Any]:
    """The conditions that all results of one matrix must share."""
    made = {"code": made_of(folders=["lab/matrix"])}
    return {"processes": processes, "steps": steps} | measured_on(environment({})) | made


def results(path: Path, wanted: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Newest results measured under the `wanted` conditions, by cell name."""
    return {result["cell"]: result for result in read_results(path) if result["conditions"] == wanted}


def work(options: argparse.Namespace) -> int:
    """Measure the missing cells, in every process."""
    from lab.matrix.run import measure
    from training import distributed

    world = distributed.start(
        rank=int(os.environ.get("RANK", 0)),
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        timeout_minutes=_HANG_MINUTES,
    )
    now = json.loads(options.worker)
    for cell in world.from_main(_missing(options, now, world.world_size)):
        name = cell.name
        if world.is_main:
            print(f"cell: {name}", flush=True)
        start = time.monotonic()
        result = measure(world, cell, steps=options.steps)
        if world.is_main:
            kept = {"cell": name, **result, "seconds": time.monotonic() - start, "conditions": now}
            keep_result(options.folder / "results.jsonl", kept)
        if "raised" in (result["verdict"], result.get("upstream", {}).get("verdict")):
            return 0  # DeepSpeed's state after an error must not affect the next cell: start new processes
    distributed.stop()
    return 0


def lead(options: argparse.Namespace) -> int:
    """Start processes until no cell is missing, then write the page."""
    log, path = options.folder / "matrix.log", options.folder / "results.jsonl"
    now = conditions(options.processes, options.steps)
    if left_out := sum(not cell.fits(options.processes) for cell in _cells(options)):
        print(f"{left_out} cells are left out: their settings do not divide {options.processes} processes")
    for processes in sorted({cell.ranks or options.processes for cell in _missing(options, now)}, reverse=True):
        while missing := _missing(options, now, processes):
            print(f"{len(missing)} cells to go on {processes} processes; tail -f {log}", flush=True)
            program = ["-m", "lab.matrix", "--worker", json.dumps(now), "--folder", str(options.folder)]
            program += ["--steps", str(options.steps), "--only", options.only]
            code = launch(program, processes=processes, log=log)
            left = _missing(options, now, processes)
            if left and code != 0:
                if f"cell: {left[0].name}" not in log.read_text(errors="replace", encoding="utf-8"):
                    raise UserError(f"the processes did not start: {error_line_of(log)}; see {log}")
                crashed = {"verdict": "raised", "reason": error_line_of(log), "errors": {}}
                keep_result(path, {"cell": left[0].name, **crashed, "seconds": 0.0, "conditions": now})
    found = results(path, now)
    cells = _cells(options, options.processes)
    different = unexpected(cells, found)
    for line in different:
        print(line)
    if not options.only:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(page(cells, found, now), encoding="utf-8")
        print(f"wrote {options.out}")
    elif options.into and not different:
        text = options.into.read_text(encoding="utf-8")
        options.into.write_text(updated(text, cells, found, now), encoding="utf-8")
        print(f"updated {options.into}")
    print(f"{len(cells)} cells, {len(different)} not as config/deepspeed/combinations.py expects")
    return UNEXPECTED if different else AS_EXPECTED


def _missing(options: argparse.Namespace, now: dict[str, Any], processes: int | None = None) -> list[Cell]:
    """Cells without a result: those measured on `processes` processes, or all of them."""
    done, usual = results(options.folder / "results.jsonl", now), now["processes"]
    wanted = (cell for cell in _cells(options, usual) if processes in (None, cell.ranks or usual))
    return [cell for cell in wanted if cell.name not in done]


def _cells(options: argparse.Namespace, processes: int | None = None) -> list[Cell]:
    """Cells that were asked for: those that a matrix on `processes` processes can measure, or all of them."""
    asked = (cell for cell in all_cells() if options.only in cell.name)
    return [cell for cell in asked if processes is None or cell.fits(processes)]


@entry_point(launched=True)
def main(arguments: Sequence[str] | None = None) -> int:
    """Start the processes, or be one of them."""
    parser = Arguments("python -m lab.matrix", __doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/matrix/precision-matrix.md"), help="the page")
    parser.add_argument("--only", default="", help="only cells whose name has this text; writes no page of its own")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="with --only: the page whose sections to replace")
    add_processes_option(parser)
    parser.add_argument("--steps", type=positive_int, default=6, help="optimizer steps of each cell")
    parser.add_argument("--folder", type=Path, default=Path("runs/matrix"), help="folder of results and log")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # the matrix's conditions, as JSON
    options = parser.parse_args(arguments)
    if options.worker:
        return work(options)
    options.processes = options.processes or default_processes()
    if options.into and not options.only:
        raise UserError(f"--into {options.into}: is for --only; the whole page goes to --out")
    if options.into and not options.into.is_file():
        raise UserError(f"--into {options.into}: there is no such page; write it with --out")
    if not _cells(options, options.processes):
        who = f"no cell has this in its name and runs on {options.processes} processes"
        raise UserError(f"--only {options.only}: {who}, such as {next(all_cells()).name}")
    options.folder.mkdir(parents=True, exist_ok=True)
    return lead(options)
