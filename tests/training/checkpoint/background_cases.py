"""Code run inside the processes of test_background.py."""

import threading
from pathlib import Path
from typing import Any

from tests.support.models.small_run import batch_of, checksum, engine_of, masters_of, resolve, restored, state_of
from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.manifest import read_state
from training.checkpoint.outcome import Saved
from training.checkpoint.retention import Retention
from training.distributed import World
from training.engine import Engine
from training.engine.tensors import momentum_norm
from training.progress import Progress


class Blocked(Checkpoints):
    """Writes nothing before `go` is set."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.go = threading.Event()

    def reached(self, phase: str) -> None:
        if phase == "write":
            assert self.go.wait(60)


def step(world: World, engine: Engine, progress: Progress, *, save_ended: bool = False) -> tuple[Progress, bool]:
    """One step on the batch of that number; also whether all ranks say that a save has ended."""
    outcome = engine.forward_backward(batch_of(world, 4, seed=progress.step), step=progress.step + 1)
    health = engine.health(outcome, save_ended_here=save_ended)
    return progress.after(tokens=128, applied=engine.step(health, 0.01).applied), health.save_ended


def train_while_it_is_written(
    world: World, *, folder: str, stage: int, compute: str, variant: str, overrides: list[str]
) -> dict[str, Any]:
    """Save after step 2, make steps 3 and 4 before a byte is written, then load what was saved and make them again."""
    resolved = resolve(world, stage=stage, compute=compute, variant=variant, overrides=overrides)
    with engine_of(world, resolved) as engine:
        checkpoints = Blocked(Path(folder), keep=Retention(2), identity={}, world=world)
        progress = Progress()
        for _ in range(2):
            progress, _ = step(world, engine, progress)
        then = checksum(masters_of(engine)), momentum_norm(engine)
        checkpoints.start_save(engine, state_of(engine, progress, guard=1))
        for _ in range(2):
            progress, ended = step(world, engine, progress, save_ended=checkpoints.save_ended)
            assert not ended
        later = checksum(masters_of(engine)), momentum_norm(engine)
        published = (Path(folder) / "step-2").exists()
        checkpoints.go.set()
        saved = checkpoints.outcomes()
        path = checkpoints.find("auto")
        progress = restored(checkpoints, path, engine)
        back = checksum(masters_of(engine)), momentum_norm(engine)
        for _ in range(2):
            progress, _ = step(world, engine, progress)
        forth = checksum(masters_of(engine)), momentum_norm(engine)
        return {
            "published before a byte was written": published,
            "steps": [outcome.step for outcome in saved if isinstance(outcome, Saved)],
            "state": read_state(path)["reactions"],
            "then": then,
            "back": back,
            "later": later,
            "forth": forth,
        }


def save_into_a_save(world: World, *, folder: str, background: bool) -> dict[str, Any]:
    """Two saves, the second asked for while the first is held for 0.5 s; and whether each was there at once."""
    with engine_of(world, resolve(world, stage=1, compute="bf16")) as engine:
        checkpoints = Blocked(Path(folder), keep=Retention(2), identity={}, world=world, background=background)
        threading.Timer(0.5, checkpoints.go.set).start()
        checkpoints.start_save(engine, state_of(engine, Progress(step=1)))
        there = [(Path(folder) / "step-1").exists()]
        checkpoints.start_save(engine, state_of(engine, Progress(step=2)))
        there.append((Path(folder) / "step-1").exists())
        first, second = checkpoints.outcomes()
        assert isinstance(first, Saved) and isinstance(second, Saved)
        return {"there": there, "stalls": (first.stall_seconds, second.stall_seconds)}


def losses_and_what_stays(world: World, *, folder: str, losses: dict[int, float | None], keep: Retention) -> list[str]:
    """A save of each step, with its validation loss; the checkpoints that are left."""
    with engine_of(world, resolve(world, stage=0, compute="fp32")) as engine:
        checkpoints = Checkpoints(Path(folder), keep=keep, identity={}, world=world)
        for number, loss in losses.items():
            checkpoints.start_save(engine, state_of(engine, Progress(step=number)), loss)
        checkpoints.outcomes()
    return sorted(path.name for path in Path(folder).glob("step-*"))
