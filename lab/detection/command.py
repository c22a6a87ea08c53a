"""Plant defects that the product does not know into small runs, and tabulate what its judge says of each.

    python -m lab.detection [--later | --wide] [--out docs/detection.md] [--only TEXT] [--folder DIR] [--minutes N]
        [--jobs N]

Each job runs one cell after another in two processes that stay up, and every result is appended to FOLDER/results.jsonl
as soon as it is there, so that an interrupted table resumes where it stopped. Results and FP32 twins know the code that
made them (`made_of`): those of other code are not used, and made again. Until every cell has a result, the page goes to
FOLDER/detection.md, and says what is not there.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from config.cli import Arguments, entry_point
from config.command_line import read_command_line
from config.errors import UserError
from config.options import positive_int
from lab.detection import run
from lab.detection.cells import (
    FURTHER_VARIANTS,
    Cell,
    all_cells,
    base,
    cell_of,
    later_cells,
    wide_cells,
    write_documents,
    write_rows,
)
from lab.detection.defects import DEFECTS, Defect
from lab.detection.made_of import made_of, measured_on
from lab.detection.page import by_kind, page, wide_alarms
from lab.results import keep_result, read_results
from precision.observe import PrecisionMismatch
from tests.support.jobs.process_group import ProcessGroup
from tracking.environment import environment
from training.engine.health import RanksDisagree
from training.engine.ledger import PrecisionError
from training.engine.weights import StaleMaster
from training.tasks.task import prepare

SECONDS = 600.0
"""For one cell, on a machine that others keep busy."""
HALVINGS = 16
_TWINS = threading.Lock()
"""Lets one job at a time look for a twin, and make it where it is missing."""
_REFUSALS = tuple(
    f"{kind.__module__}.{kind.__qualname__}: "
    for kind in (UserError, PrecisionError, StaleMaster, PrecisionMismatch, RanksDisagree)
)
"""Starts of the lines by which a run ends itself. All others are crashes, which name nothing."""


class NoAnswer(Exception):
    """Nothing was said of a defect: a run crashed, or processes were too slow. The next table tries it again."""


class Cells:
    """Runs cells in a pair of processes of its own, in a folder that other jobs may share."""

    def __init__(self, pair: ProcessGroup, folder: Path, code: str, job: int = 0) -> None:
        """code: what `made_of` says."""
        self._pair, self._folder, self._code, self._job = pair, folder, code, job

    def result(self, cell: Cell, size: float | None = None) -> dict[str, Any]:
        """The findings of one cell. A run that refuses to go on counts as found, by the line that says why.

        "alone" is what a plain run of the same config reported of itself; of a healthy set-up over all architectures
        there is none. Raises NoAnswer.
        """
        return {"alone": [] if cell.is_wide else self._alone(cell, size), **self._judged(cell, size)}

    def _alone(self, cell: Cell, size: float | None) -> list[str]:
        name = f"candidate-{self._job}-alone"
        try:
            found: list[str] = self._pair.run(
                run.alone, folder=str(self._folder), cell=cell, name=name, size=size, seconds=SECONDS
            )[0]
        except AssertionError as problem:
            return [self._refusal(cell, problem)]
        return found

    def _judged(self, cell: Cell, size: float | None = None) -> dict[str, Any]:
        folder, name = str(self._folder), run.twin_name(cell)
        try:
            with _TWINS:
                self._pair.run(run.twin, folder=folder, cell=cell, name=name, code=self._code, seconds=SECONDS)
        except AssertionError as problem:
            if not run.shares_defect(cell):
                raise NoAnswer(f"{cell.name}: its FP32 twin failed: {_last_line(problem)}") from problem
            return self._refused(cell, problem)
        try:
            found: dict[str, Any] = self._pair.run(
                run.run, folder=folder, cell=cell, name=f"candidate-{self._job}", size=size, seconds=SECONDS
            )[0]
        except AssertionError as problem:
            return self._refused(cell, problem)
        return found

    def smallest(self, defect: Defect) -> dict[str, Any]:
        """The smallest size, by halving, of which single steps in BF16 at ZeRO-2 say that something is wrong.

        Of a flipped bit the lowest position, in a whole run.
        """
        cell = cell_of(defect, "bf16", 2)
        found, size = None, defect.size
        for _ in range(HALVINGS):
            if defect.unit == "bit":
                judged = self._judged(cell, size)
            else:
                name = f"steps-alone-{self._job}"
                where = {"folder": str(self._folder), "cell": cell, "name": name, "size": size}
                try:
                    judged = self._pair.run(run.steps_alone, **where, seconds=SECONDS)[0]
                except AssertionError as problem:
                    raise NoAnswer(f"smallest {defect.name}: {_last_line(problem)}") from problem
            if not judged["found_by"]:
                break
            found = {"size": size, "found_by": judged["found_by"]}
            if size == 0:
                break
            size = float(size // 2) if defect.unit == "bit" else size / 2
        return {"smallest": found, "not_found": size if found is None or size != found["size"] else None}

    def _refused(self, cell: Cell, problem: AssertionError) -> dict[str, Any]:
        kind, _, said = self._refusal(cell, problem).partition(": ")
        by = [f"refused: {kind.rpartition('.')[2]}"]
        return {"found_by": by, "said": [said[:300]], "modules": [], "ranks": [], "oracle": ""}

    def _refusal(self, cell: Cell, problem: AssertionError) -> str:
        """The line by which a run ended itself. Raises NoAnswer."""
        line = next((text for text in str(problem).splitlines() if text.startswith(_REFUSALS)), None)
        if line is None:
            raise NoAnswer(f"{cell.name}: {_last_line(problem)}") from problem
        (self._folder / f"refused-{self._job}.txt").write_text(f"{cell.name}\n{problem}\n", encoding="utf-8")
        return line


def _last_line(problem: AssertionError) -> str:
    return [text for text in str(problem).splitlines() if text.strip()][-1].strip()


def conditions() -> dict[str, Any]:
    """The sentence on where the page was measured."""
    facts = environment({})
    return measured_on(facts) | {"commit": ((facts["git"] or {}).get("commit") or "unknown")[:12]}


def results(path: Path, code: str) -> tuple[dict[str, dict[str, Any]], int]:
    """The newest result of each cell that this code has made, by its name; and how many other code has made."""
    known, others = {}, 0
    for found in read_results(path):
        if found.get("code") == code:
            known[found["cell"]] = found
        else:
            others += 1
    return known, others


def prepare_data(folder: Path, *, later: bool = False) -> None:
    """Tokenize once, here: the ranks are daemons, which may not start workers of their own.

    later: also for the variants of later defects.
    """
    if not (folder / "short.jsonl").exists():
        write_documents(folder)
    if later and not (folder / "base").exists():
        write_rows(folder)
    for variant in ("plain", "documents", *(FURTHER_VARIANTS if later else ())):
        prepare(read_command_line([*base(folder, variant)]).config, progress=False)


def measure(options: argparse.Namespace, code: str) -> None:
    """Every cell that is missing, for as long as there is time, `options.jobs` of them side by side."""
    path = options.folder / "results.jsonl"
    known, others = results(path, code)
    if others:
        print(f"{path}: {others} results of other code are not used", flush=True)
    wanted = later_cells() if options.later else wide_cells() if options.wide else [*all_cells(), *wide_cells()]
    cells = [cell for cell in wanted if options.only in cell.name and cell.name not in known]
    sizes = [
        defect for defect in DEFECTS if defect.unit and "bf16" in defect.paths and not (options.later or options.wide)
    ]
    scalable = [defect for defect in sizes if options.only in defect.name and f"smallest {defect.name}" not in known]
    tasks: list[tuple[str, Callable[[Cells], dict[str, Any]]]] = [
        *((cell.name, lambda cells, cell=cell: cells.result(cell)) for cell in cells),
        *((f"smallest {one.name}", lambda cells, one=one: cells.smallest(one)) for one in scalable),
    ]
    if tasks:
        _Table(path, code, tasks, ends=time.monotonic() + 60 * options.minutes).make(options.folder, options.jobs)


class _Table:
    """Cells that are made side by side, and their lines in the file of results."""

    def __init__(
        self, path: Path, code: str, tasks: Sequence[tuple[str, Callable[[Cells], dict[str, Any]]]], *, ends: float
    ) -> None:
        self._path, self._code, self._ends = path, code, ends
        self._left, self._all, self._done = list(reversed(tasks)), len(tasks), 0
        self._started, self._lock = time.monotonic(), threading.Lock()

    def make(self, folder: Path, jobs: int) -> None:
        """All of them; whatever a job raises ends it, and is raised here once the others have ended their cells."""
        with ThreadPoolExecutor(jobs) as pool:
            ended = [pool.submit(self._work, folder, job) for job in range(jobs)]
            try:
                for job in ended:
                    job.result()
            finally:
                self._ends = 0.0

    def _work(self, folder: Path, job: int) -> None:
        with ProcessGroup(2) as pair:
            cells = Cells(pair, folder, self._code, job)
            while (task := self._next()) is not None:
                name, make = task
                started = time.monotonic()
                try:
                    found = make(cells)
                except NoAnswer as problem:
                    self._say(f"no result: {problem}")
                    continue
                self._keep({"cell": name, **found, "code": self._code, "seconds": time.monotonic() - started})

    def _next(self) -> tuple[str, Callable[[Cells], dict[str, Any]]] | None:
        with self._lock:
            return self._left.pop() if self._left and time.monotonic() < self._ends else None

    def _keep(self, result: dict[str, Any]) -> None:
        with self._lock:
            keep_result(self._path, result)
        found = result["smallest"] if "smallest" in result else ", ".join(result["found_by"]) or "nothing"
        self._say(f"{result['cell']}: {found}")

    def _say(self, line: str) -> None:
        with self._lock:
            self._done += 1
            minutes = (time.monotonic() - self._started) / 60
            left = minutes / self._done * (self._all - self._done)
            print(f"{self._done}/{self._all}, {minutes:.1f} min, about {left:.0f} more: {line}", flush=True)


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing and write the page."""
    parser = Arguments("python -m lab.detection", __doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/detection/detection.md"), help="the page")
    parser.add_argument("--later", action="store_true", help="the defects of lab/detection/later.py; writes no page")
    parser.add_argument("--wide", action="store_true", help="healthy set-ups over all architectures; writes no page")
    parser.add_argument("--only", default="", help="only cells whose name has this text; writes no page")
    parser.add_argument("--minutes", type=float, default=600.0, help="start no cell after this many minutes")
    parser.add_argument("--jobs", type=positive_int, default=1, help="cells side by side, two processes each")
    parser.add_argument("--folder", type=Path, default=Path("runs/detection"), help="folder of results and runs")
    options = parser.parse_args(arguments)
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    code = made_of()
    prepare_data(options.folder, later=options.later)
    measure(options, code)
    found, _ = results(options.folder / "results.jsonl", code)
    if options.wide:
        print(wide_alarms(found))
    elif options.later:
        print(by_kind(later_cells(), found))
    elif not options.only:
        left = sum(cell.name not in found for cell in (*all_cells(), *wide_cells()))
        out = options.folder / "detection.md" if left else options.out
        out.parent.mkdir(parents=True, exist_ok=True)
        minutes = sum(each["seconds"] for each in found.values()) / 60
        out.write_text(page(all_cells(), found, conditions() | {"minutes": minutes}), encoding="utf-8")
        print(f"wrote {out}" + (f", of a part: {left} runs have no result yet" if left else ""))
    return 0
