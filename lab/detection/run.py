"""One cell on the ranks of a group that stays up: what `train.py` and `tools.parity` do, one after the other."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from config.command_line import read_command_line
from config.files import write_atomically
from config.resolved import Resolved
from lab.detection.cells import Cell, base, precision
from lab.detection.defects import Defect
from lab.detection.judge import judged, judged_steps, of_whole_runs, said_by_itself
from lab.detection.made_of import made_of
from lab.detection.plants.site import planted
from tools.parity.alternatives import moved_start
from tools.parity.every_step import settings
from tools.parity.jobs import WALK, Run, trajectory
from tools.parity.judge_runs import AGAIN, MOST_APART, in_doubt, rounding_to
from tools.parity.steps import measure
from tracking.run_dir import RunDir
from training.build import build
from training.distributed import World
from training.loop import train
from training.session import locked_run_dir, run_dir_of, session


def twin(
    world: World, *, folder: str, cell: Cell, name: str, code: str, a_bit: int | None = None, lost: Sequence[int] = ()
) -> None:
    """The FP32 run that a cell is compared with, unless it is there, made by this code from the same arguments.

    a_bit: draw of weights that are off by the cell's rounding, a change that only a chaotic run amplifies. lost: steps
    that are not applied.
    """
    where = Path(folder)
    mark = where / "runs" / name / "made_of.json"
    overrides = [*precision(where, "fp32", 2), "checkpoint.every_steps=0"]
    overrides += [f"faults=[{', '.join(f'{{kind: lost_update, step: {step}}}' for step in lost)}]"] if lost else []
    if not (cell.is_wide or shares_defect(cell)):
        overrides.append("checkpoint.at_end=false")
    elif a_bit is None and not lost:
        overrides.append(f"checkpoint.also_after=[{cell.points[-1]}]")
    made = json.dumps([code, *_arguments(where, cell, name), *overrides])
    if world.from_main(mark.exists() and mark.read_text(encoding="utf-8") == made):
        return
    resolved = _resolve(where, cell, name, overrides)
    moved: AbstractContextManager[None] = nullcontext()
    if a_bit is not None:
        own = _resolve(where, cell, name, precision(where, cell.path, 2))
        moved = moved_start(rounding_to(own.config.precision), a_bit)
    with moved:
        _train(world, resolved, cell.defect if shares_defect(cell) else None)
    if world.is_main:
        write_atomically(mark, made.encode())
    world.gather_objects(None)


def twin_name(cell: Cell) -> str:
    """The run of its twin; that of a defect which both have is its own."""
    shared = f"-{_plain(cell.defect.name)}" if cell.defect is not None and shares_defect(cell) else ""
    return f"fp32-{_plain(cell.variant)}-{cell.seed}{shared}"


def shares_defect(cell: Cell) -> bool:
    """Whether the twin has the cell's defect, too."""
    return cell.defect is not None and cell.defect.shared


def run(world: World, *, folder: str, cell: Cell, name: str, size: float | None = None) -> dict[str, Any] | None:
    """Train as the run `name`, compare single steps, judge; what was found, on rank 0."""
    where = Path(folder)
    started, cpu = time.monotonic(), time.process_time()
    overrides = [f"checkpoint.every_steps={cell.every}", f"checkpoint.also_after=[{cell.points[-1]}]"]
    overrides = [*precision(where, cell.path, cell.stage), *overrides, "checkpoint.keep=4", *cell.overrides]
    bounds = _resolve(where, cell, name, overrides).config.parity
    overrides += settings([*_arguments(where, cell, name), *overrides], os.environ, bounds.whole_steps)
    resolved = _resolve(where, cell, name, overrides)
    code = _train(world, resolved, cell.defect, size)
    with _planted(cell.defect, world, size):
        measured = measure(run_dir_of(resolved), resolved, list(cell.points), length=WALK, world=world)
    mine, other = run_dir_of(resolved), RunDir(where / "runs" / twin_name(cell))
    alike, apart, again = other, list[Path](), list[Path]()

    def doubtful() -> bool:
        return cell.is_wide and bool(
            world.from_main(world.is_main and in_doubt(of_whole_runs(mine, alike, bounds, apart, again)))
        )

    lost = world.from_main(trajectory(Run(mine, True, "", None)).lost if world.is_main else None)
    if lost and doubtful():
        alike = RunDir(where / "runs" / f"{twin_name(cell)}-{cell.path}-without-{len(lost)}")
        twin(world, folder=folder, cell=cell, name=alike.path.name, code=made_of(), lost=lost)
    while len(apart) < MOST_APART and doubtful():  # by a defect, or by chaos alone
        apart.append(where / "runs" / f"{twin_name(cell)}-{cell.path}-apart-{len(apart) + 1}")
        twin(world, folder=folder, cell=cell, name=apart[-1].name, code=made_of(), a_bit=len(apart) - 1)
    for draw in range(AGAIN if doubtful() else 0):
        moved = _resolve(where, cell, f"{name}-apart-{draw + 1}", [*overrides, "checkpoint.every_steps=0"])
        with moved_start(rounding_to(moved.config.precision), draw):
            _train(world, moved, cell.defect, size)
        again.append(run_dir_of(moved).path)
    if not world.is_main:
        return None
    points = [point for point in cell.points if point] if cell.is_wide or shares_defect(cell) else None
    recomputed = 0 if cell.is_wide else cell.every
    found = judged(
        mine,
        other,
        measured,
        resolved,
        of_whole_runs(mine, alike, bounds, apart, again),
        code=code,
        recomputed=recomputed,
        points=points,
    )
    return {**found, "seconds": time.monotonic() - started, "cpu": time.process_time() - cpu}


def alone(world: World, *, folder: str, cell: Cell, name: str, size: float | None = None) -> list[str]:
    """The findings of a plain run with default checks; one with a defect of its state is resumed."""
    where = Path(folder)
    overrides = [*precision(where, cell.path, cell.stage), *cell.overrides, "checkpoint.every_steps=0"]
    half = [f"run.steps={cell.steps // 2}", f"schedule.steps={cell.steps}"]
    resumes = cell.defect is not None and cell.defect.group == "state"
    code, resolved = 0, _resolve(where, cell, name, overrides)
    if resumes:
        code = _train(world, _resolve(where, cell, name, [*overrides, *half]), cell.defect, size)
        resolved = _resolve(where, cell, name, [*overrides, "run.resume=auto", half[1]])
    if not code:
        code = _train(world, resolved, cell.defect, size, anew=not resumes)
    return said_by_itself(run_dir_of(resolved).events, code)


def steps_alone(world: World, *, folder: str, cell: Cell, name: str, size: float) -> dict[str, Any] | None:
    """The first two steps of a run compared with FP32, and nothing else: for the smallest size that is found."""
    where = Path(folder)
    resolved = _resolve(where, cell, name, [*precision(where, cell.path, cell.stage), *cell.overrides])
    with _planted(cell.defect, world, size):
        measured = measure(run_dir_of(resolved), resolved, [0], length=WALK, world=world)
    return judged_steps(measured, resolved) if world.is_main else None


def _train(
    world: World, resolved: Resolved, defect: Defect | None, size: float | None = None, *, anew: bool = True
) -> int:
    """Train with the defect, in its own size or another one; the exit code."""
    if world.is_main and anew:
        shutil.rmtree(run_dir_of(resolved).path, ignore_errors=True)
    world.gather_objects(None)
    with _planted(defect, world, size), locked_run_dir(resolved, world), session(resolved, world=world) as opened:
        parts, progress = build(opened)
        try:
            ending = train(parts, progress)
            where = {"step": ending.progress.step, "tokens": ending.progress.tokens}
            status = "done" if ending.exit_code == 0 else "aborted"
            parts.record.event("run_end", **where, status=status, exit_code=ending.exit_code, reason=ending.reason)
        finally:
            parts.checkpoints.outcomes()  # the saving thread would die with the process
            parts.record.close()
    world.gather_objects(None)
    return ending.exit_code


def _planted(defect: Defect | None, world: World, size: float | None) -> AbstractContextManager[None]:
    if defect is None:
        return nullcontext()
    return planted(defect.plant, rank=world.rank, size=defect.size if size is None else size)


def _resolve(folder: Path, cell: Cell, name: str, overrides: list[str]) -> Resolved:
    return read_command_line([*_arguments(folder, cell, name), *overrides])


def _arguments(folder: Path, cell: Cell, name: str) -> list[str]:
    return [*base(folder, cell.variant, seed=cell.seed, steps=cell.steps), f"run.name={name}"]


def _plain(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text)
