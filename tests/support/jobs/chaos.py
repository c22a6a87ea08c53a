"""Kill processes in the middle of saves, start the job again, and check which checkpoint it resumes from.

A job is two processes forked from a server that has imported everything. It resumes as `run.resume: auto` does, reports
its step and the checksum of its masters, takes one step and saves. Each resumed job is compared with the checksums of
an undisturbed one.
"""

import os
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from config.machine.processes import free_port
from tests.support.jobs import forked
from tests.support.models.small_run import batch_of, checksum, engine_of, masters_of, resolve, restored, saved
from training import distributed
from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.retention import Retention
from training.progress import Progress

ON_EVERY_RANK = ("begin", "write", "flush", "written")
ON_MAIN = ("manifest", "sealed", "replacing", "renamed", "latest", "named", "dropping", "done")
PUBLISHED_AFTER = ("renamed", "latest", "named", "dropping", "done")
"""Phases of which a kill leaves the new checkpoint as the newest; of the others, the one before it."""
KEEP = 2
START_SECONDS = 300.0
"""On a machine that other tests keep busy."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL to `rank` as it reaches `phase` for the `count`th time; or, without a phase, `delay` seconds after it
    began to save. alone: the other process is not killed too."""

    phase: str
    rank: int = 0
    count: int = 1
    delay: float = 0.0
    alone: bool = True


class KilledCheckpoints(Checkpoints):
    """Kills its process at the phase of `kill`."""

    kill: Kill | None = None
    reached_so_far = 0

    def reached(self, phase: str) -> None:
        if self.kill is None or (phase, self.world.rank) != (self.kill.phase, self.kill.rank):
            return
        self.reached_so_far += 1
        if self.reached_so_far == self.kill.count:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class JobReport:
    """The report that a job sent back."""

    step: int
    """The step it resumed from."""
    checksums: dict[int, str]
    """Checksums of its masters, at that step and after each later one."""
    exit_codes: tuple[int | None, ...]
    seconds: float


def run_job(folder: Path, *, stage: int, compute: str, steps: int = 1, kill: Kill | None = None) -> JobReport:
    """One session of the job on `folder`: so many steps, a save after each, and death in the last save.

    Raises AssertionError with the traceback when it fails before that.
    """
    context, started = forked.context(), time.perf_counter()
    port = free_port()
    workers: list[tuple[Any, Connection]] = []
    for rank in range(2):
        mine, theirs = context.Pipe()
        worker = context.Process(target=_work, args=(theirs, rank, port, folder, stage, compute, steps, kill))
        worker.start()
        theirs.close()
        workers.append((worker, mine))
    try:
        reports = [[_receive(pipe, rank) for _ in range(steps)] for rank, (_, pipe) in enumerate(workers)]
        if kill is not None and not kill.phase:
            time.sleep(kill.delay)
            workers[kill.rank][0].kill()
        if kill is not None and not kill.alone:
            workers[kill.rank][0].join(60)
            workers[1 - kill.rank][0].kill()
        for worker, _ in workers:
            worker.join(60)
        codes = tuple(worker.exitcode for worker, _ in workers)
    finally:
        for worker, _ in workers:
            worker.kill()
    assert reports[0] == reports[1]
    return JobReport(reports[0][0][0], dict(reports[0]), codes, time.perf_counter() - started)


def kill_again_and_again(folder: Path, kills: list[Kill], *, stage: int, compute: str) -> dict[str, int]:
    """Run the job once for each kill and once more at the end; how many kills of each phase it survived.

    Raises AssertionError when a job resumes from another checkpoint than it should or with other masters, or when a
    kill did not happen.
    """
    truth = run_job(folder / "undisturbed", stage=stage, compute=compute, steps=len(kills) + KEEP + 2).checksums
    survived: dict[str, int] = {}
    disturbed = folder / "disturbed"
    run_job(disturbed, stage=stage, compute=compute, steps=KEEP)  # so that a later save has something to drop
    expected = {KEEP}
    for kill in [*kills, None]:
        report = run_job(disturbed, stage=stage, compute=compute, kill=kill)
        assert report.step in expected, f"resumed from step {report.step}, not {expected}, before {kill}"
        assert report.checksums[report.step] == truth[report.step], f"other masters before {kill}"
        if kill is None:
            assert report.exit_codes == (0, 0)
            break
        assert -signal.SIGKILL in report.exit_codes or not kill.phase, f"{kill} did not happen: {report.exit_codes}"
        if not kill.phase:
            expected = {report.step, report.step + 1}
        elif kill.phase == "replacing":
            expected = {report.step}
        else:
            expected = {report.step + (kill.phase in PUBLISHED_AFTER)}
        name = kill.phase or "at random"
        survived[name] = survived.get(name, 0) + 1
    leftovers = [path.name for path in disturbed.iterdir() if path.name.startswith(".") or ".damaged" in path.name]
    assert leftovers == []
    return survived


def random_kills(count: int, seed: int, *, within: float) -> list[Kill]:
    """Kills after a random time, up to `within` seconds into a save."""
    draw = random.Random(seed)
    return [Kill("", draw.randrange(2), delay=draw.uniform(0, within), alone=draw.random() < 0.5) for _ in range(count)]


def _receive(pipe: Connection, rank: int) -> tuple[int, str]:
    assert pipe.poll(START_SECONDS), f"rank {rank} reported nothing"
    try:
        good, value = pipe.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} died before it saved") from None
    assert good, f"rank {rank}:\n{value}"
    return value


def _work(
    pipe: Connection, rank: int, port: int, folder: Path, stage: int, compute: str, steps: int, kill: Kill | None
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
    torch.set_num_threads(1)
    try:
        world = distributed.start(rank=rank, world_size=2, local_rank=rank)
        with engine_of(world, resolve(world, stage=stage, compute=compute)) as engine:
            checkpoints = KilledCheckpoints(folder, keep=Retention(KEEP), identity={"stage": stage}, world=world)
            torch.manual_seed(rank)
            found, progress = checkpoints.find("auto"), Progress()
            if found is not None:
                progress = restored(checkpoints, found, engine)
            for left in reversed(range(steps)):
                pipe.send((True, (progress.step, checksum(masters_of(engine)))))
                if kill is None or kill.phase != "replacing":  # which needs a save of the step that is there already
                    health = engine.health(engine.forward_backward(batch_of(world, 4, seed=progress.step), step=1))
                    progress = progress.after(tokens=128, applied=engine.step(health, 0.001).applied)
                checkpoints.kill = kill if left == 0 else None
                saved(checkpoints, engine, progress)
        distributed.stop()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        os._exit(1)
