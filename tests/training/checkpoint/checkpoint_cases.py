"""Code run inside the processes of tests of checkpoints. Every function is called on every rank."""

import contextlib
import math
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from config.errors import UserError
from tests.support.models.small_run import (
    RandomBatches,
    batch_of,
    checksum,
    engine_of,
    masters_of,
    resolve,
    restored,
    saved,
    state_of,
    take,
)
from tests.support.refusals import refused
from tests.tools.parity.step_cases import step_parity
from tools.replay.repeat import Collector
from tracking.record import Record
from training.build import assemble
from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.choice import by_step, newest, step_of
from training.checkpoint.manifest import Written, layout_of, read_manifest, read_state
from training.checkpoint.outcome import NotFinite, Saved, SaveFailed
from training.checkpoint.retention import Retention
from training.checkpoint.save import agree_on_files
from training.checkpoint.store.errors import StoreError
from training.checkpoint.store.remote import Remote
from training.checkpoint.store.store import Store
from training.distributed import World
from training.engine import Engine
from training.engine.tensors import momentum_norm
from training.loop import train
from training.preemption import Preemption
from training.progress import Progress
from training.session import session


def clipping_after_load(world: World, *, stage: int, compute: str, folder: str) -> list[dict[str, Any]]:
    """Steps measured against AdamW by hand, on a checkpoint that was saved with another clipping norm."""
    for clipping in ("1.0", "0.01"):
        overrides = [f"optimizer.gradient_clipping={clipping}", "precision.loss_scale.initial=256"]
        resolved = resolve(world, stage=stage, compute=compute, overrides=overrides)
        with engine_of(world, resolved) as engine:
            checkpoints = Checkpoints(Path(folder), keep=Retention(2), identity={}, world=world)
            found = checkpoints.find("auto")
            progress = restored(checkpoints, found, engine) if found else Progress()
            parity = step_parity(engine, resolved, world)
            rows = [parity.step(batch_of(world, 4, seed=seed), applied=progress.applied + seed) for seed in range(2)]
            for row in rows:
                progress = progress.after(tokens=128, applied=row["applied"])
            saved(checkpoints, engine, progress)
    return rows


def save_steps(
    world: World,
    *,
    folder: str,
    stage: int,
    compute: str,
    steps: int,
    keep: int = 9,
    store: str | None = None,
    best: int = 0,
) -> None:
    """A run of so many steps, a checkpoint after each. store: a folder that stands for an object store. best: as in
    Retention."""
    rules = Retention(keep, best=best)
    with engine_of(world, resolve(world, stage=stage, compute=compute)) as engine:
        checkpoints = Checkpoints(
            Path(folder),
            keep=rules,
            identity={"stage": stage},
            world=world,
            run_name="tried",
            remote=_remote(store, rules),
        )
        progress = Progress()
        for step in range(1, steps + 1):
            _, update = take(engine, batch_of(world, 4, seed=step), step=step, lr=0.001)
            progress = progress.after(tokens=128, applied=update.applied)
            saved(checkpoints, engine, progress, step=step)


def find(
    world: World,
    *,
    folder: str,
    resume: str,
    identity: dict[str, Any] | None = None,
    store: str | None = None,
    denied: bool = False,
) -> tuple[str, list[str]]:
    """The name of what `find` chooses ("" for nothing) or the error's text, and what there is to record. store: as for
    `save_steps`. denied: rank 1 may not read from it."""
    remote = _remote(store, Retention(2))
    checkpoints = Checkpoints(Path(folder), keep=Retention(2), identity=identity or {}, world=world, remote=remote)
    if remote and denied and world.rank == 1:

        def download(name: str, *arguments: Any, **options: Any) -> None:
            raise StoreError(f"{name}: access denied")

        remote.store.download = download  # type: ignore[method-assign]
    try:
        found = checkpoints.find(resume)
    except UserError as error:
        return f"error: {error}", checkpoints.take_notes()
    assert checkpoints.any_saved == (found is not None and found.parent == Path(folder))
    return found.name if found else "", checkpoints.take_notes()


def _remote(store: str | None, keep: Retention) -> Remote | None:
    return Remote(Store(f"file://{store}"), keep) if store else None


def go_back_and_save(world: World, *, folder: str, to: str) -> None:
    """Resume from a checkpoint by its path, and save the step after it."""
    with engine_of(world, resolve(world, stage=2, compute="bf16")) as engine:
        checkpoints = Checkpoints(Path(folder), keep=Retention(9), identity={}, world=world)
        progress = restored(checkpoints, checkpoints.find(f"{folder}/{to}"), engine)
        saved(checkpoints, engine, progress.after(tokens=128, applied=True))


def save_to_a_store_later(world: World, *, folder: str, store: str) -> list[list[int]]:
    """The steps in the run folder after each save; those from 8 on are uploaded as well, which fails for 9 and 10."""
    rules, left = Retention(1, every=2), list[list[int]]()
    with engine_of(world, resolve(world, stage=1, compute="fp32")) as engine:
        for remote, steps in ((None, (2, 4, 6)), (_remote(store, rules), (8, 9, 10, 11, 12))):
            checkpoints = Checkpoints(Path(folder), keep=rules, identity={}, world=world, remote=remote)
            for step in steps:
                with pytest.MonkeyPatch.context() as patch:
                    if step in (9, 10):
                        patch.setattr(Store, "upload", Mock(side_effect=StoreError("the store is down")))
                    checkpoints.start_save(engine, state_of(engine, Progress(step=step)))
                    checkpoints.outcomes()
                left.append([step_of(path) for path in reversed(by_step(Path(folder)))])
    return left


def save_without_descriptors(world: World, *, folder: str) -> list[str]:
    """The outcomes of three saves; during the second no further file can be opened."""
    outcomes = []
    with engine_of(world, resolve(world, stage=1, compute="fp32")) as engine:
        checkpoints = Checkpoints(Path(folder), keep=Retention(9), identity={}, world=world)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for step in (1, 2, 3):
            with contextlib.ExitStack() as held:
                if step == 2:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
                    with contextlib.suppress(OSError):
                        while True:
                            held.enter_context(Path(os.devnull).open())
                checkpoints.start_save(engine, state_of(engine, Progress(step=step)))
                outcomes += [str(outcome) for outcome in checkpoints.outcomes()]
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return outcomes


def load_into_another_model(world: World, *, path: str) -> str:
    """The error of loading a checkpoint into a model with a wider feed-forward layer."""
    wider = ["model.config.intermediate_size=64"]
    with engine_of(world, resolve(world, stage=2, compute="bf16", overrides=wider)) as engine:
        checkpoints = Checkpoints(Path(path).parent, keep=Retention(2), identity={}, world=world)
        return refused(checkpoints.load, Path(path), engine)


def save_where_it_fails(world: World, *, folder: str, limit: int | None = None) -> dict[str, Any]:
    """Two saves, of which the second meets a disk that takes no more, and a third when it takes some again.

    limit: bytes that rank 1 may write into one file during the second save; None: the file system is filled instead.
    """
    ballast = Path(folder).parent / "ballast"
    with engine_of(world, resolve(world, stage=2, compute="bf16")) as engine:
        checkpoints = Checkpoints(Path(folder), keep=Retention(2), identity={}, world=world)
        saved(checkpoints, engine, Progress(step=1))
        masters = masters_of(engine)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit is not None and world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        if limit is None and world.is_main:
            _fill(ballast)
        world.wait_for_all()
        with pytest.raises(SaveFailed) as error:
            saved(checkpoints, engine, Progress(step=2))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        world.wait_for_all()
        names = sorted(path.name for path in Path(folder).iterdir())
        failures = checkpoints.failures
        found = checkpoints.find("auto")
        world.wait_for_all()
        if limit is None and world.is_main:
            ballast.unlink()
        world.wait_for_all()
        saved(checkpoints, engine, Progress(step=3))
        progress = restored(checkpoints, checkpoints.find("auto"), engine)
        after = masters_of(engine)
        return {
            "error": str(error.value),
            "names": names,
            "failures": (failures, checkpoints.failures),
            "found": found.name,
            "step": progress.step,
            "same": all(torch.equal(after[name], masters[name]) for name in masters),
        }


def spoiled_save(world: World, *, folder: str, stage: int, compute: str, split: bool, rank: int) -> tuple[str, str]:
    """A saved step, then a save with a NaN in a master of one rank: its error, and which checkpoint is the newest.

    A buffer of the model has an inf at both, which is no master.
    """
    overrides = [f"precision.masters={'split' if split else 'fp32'}"]
    with engine_of(world, resolve(world, stage=stage, compute=compute, overrides=overrides)) as engine:
        engine.model.register_buffer("mask", torch.tensor([-math.inf]))
        checkpoints = Checkpoints(Path(folder), keep=Retention(2), identity={}, world=world)
        saved(checkpoints, engine, Progress(step=1))
        if world.rank == rank and engine.split_masters is not None:
            for master in engine.split_masters.of.values():
                for _, piece in master.pieces():
                    piece[0] = math.nan
        elif world.rank == rank:
            engine.masters()[-1].detach().view(-1)[0] = math.nan
        with pytest.raises(NotFinite) as error:
            saved(checkpoints, engine, Progress(step=2))
        return str(error.value), str(newest(Path(folder)))


def failing_save(world: World, *, folder: str) -> str:
    """The error of a save of step 2."""
    with engine_of(world, resolve(world, stage=2, compute="bf16")) as engine, pytest.raises(SaveFailed) as error:
        saved(Checkpoints(Path(folder), keep=Retention(2), identity={}, world=world), engine, Progress(step=2))
    return str(error.value)


def read_back(world: World, *, folder: str, corrupt: bool) -> dict[str, Any]:
    """Two saves that are read back; the second one's shard of rank 1 rots right after it was published, if corrupt."""

    class Rotting(Checkpoints):
        def reached(self, phase: str) -> None:
            if corrupt and phase == "named" and (self.folder / "step-2").exists():
                flip(next((self.folder / "step-2" / "deepspeed").glob("*pp_rank_1*optim_states.pt")))

    with engine_of(world, resolve(world, stage=2, compute="bf16")) as engine:
        checkpoints = Rotting(Path(folder), keep=Retention(1), identity={}, world=world, verify_after_save=True)
        outcomes = []
        for step in (1, 2):
            checkpoints.start_save(engine, state_of(engine, Progress(step=step)))
            outcomes += checkpoints.outcomes()
        found = checkpoints.find("auto")
        return {
            "verified": [isinstance(outcome, Saved) and outcome.verified for outcome in outcomes],
            "last": str(outcomes[-1]),
            "found": found.name,
            "any": checkpoints.any_saved,
            "failures": checkpoints.failures,
        }


def flushes_and_renames(world: World, *, folder: str) -> list[tuple[str, ...]]:
    """The first save's requests to the operating system, in order; paths inside the folder."""
    asked: list[tuple[str, ...]] = []
    fsync, renamed, replaced = os.fsync, Path.rename, Path.replace

    def inside(path: Any) -> str:
        return os.path.relpath(path, folder)

    def noted_fsync(handle: int) -> None:
        asked.append(("flush", inside(Path(f"/proc/self/fd/{handle}").readlink())))
        fsync(handle)

    def noted(move: Any) -> Any:
        def act(path: Path, target: Any) -> Path:
            asked.append(("rename", inside(path), inside(target)))
            return move(path, target)

        return act

    with engine_of(world, resolve(world, stage=1, compute="fp32")) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", noted_fsync)
        patch.setattr(Path, "rename", noted(renamed))
        patch.setattr(Path, "replace", noted(replaced))
        saved(Checkpoints(Path(folder), keep=Retention(2), identity={}, world=world), engine, Progress(step=1))
    return asked


def loop_with_failures(
    world: World, *, folder: str, failing: Sequence[int], further: Sequence[str] = ()
) -> dict[str, Any]:
    """The training loop over 9 steps with a save every 2; saves of `failing` find no room for more than 1000 bytes."""
    overrides = ["run.steps=9", "schedule.warmup_steps=2", "checkpoint.every_steps=2", "checkpoint.keep=3"]
    collected = Collector()

    class Tight(Checkpoints):
        def start_save(self, engine: Any, state: dict[str, Any], *further: Any) -> None:
            free = resource.getrlimit(resource.RLIMIT_FSIZE)
            if state["progress"]["step"] in failing:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, free[1]))
            super().start_save(engine, state, *further)
            while not self.save_ended:
                time.sleep(0.001)
            resource.setrlimit(resource.RLIMIT_FSIZE, free)

    resolved = resolve(world, stage=1, compute="fp32", overrides=[*overrides, "evaluate.every_steps=0", *further])
    with engine_of(world, resolved) as engine:
        checkpoints = Tight(Path(folder), keep=Retention(3), identity={}, world=world)
        parts, progress = assemble(
            resolved,
            engine,
            RandomBatches(world),
            record=Record([collected]),
            checkpoints=checkpoints,
            validation=lambda: [batch_of(world, 4, seed=99)],
            preemption=Preemption(resolved.config.run.max_minutes, signals=False),
        )
        ending = train(parts, progress)
    notes = [event["text"] for event in collected.events if event["event"] == "note"]
    incidents = [(event["verdict"], event["reason"]) for event in collected.events if event["event"] == "incident"]
    names = sorted(path.name for path in Path(folder).glob("step-*"))
    losses = {name: read_manifest(Path(folder) / name)["validation_loss"] for name in names}
    return {"ending": ending, "notes": notes, "saved": names, "incidents": incidents, "losses": losses}


def train_in_sessions(world: World, *, folder: str, sessions: int, keep: Retention) -> dict[str, Any]:
    """Four steps with an evaluation after each, in so many sessions: all but the last end after their first step."""
    collected, codes = Collector(), []
    given = ["run.steps=4", "schedule.warmup_steps=0", "evaluate.every_steps=1", f"checkpoint.keep_best={keep.best}"]
    for number in range(1, sessions + 1):
        resolved = resolve(world, stage=2, compute="bf16", overrides=given)
        with engine_of(world, resolved) as engine:
            checkpoints = Checkpoints(Path(folder), keep=keep, identity={}, world=world)
            path = checkpoints.find("auto")
            parts, progress = assemble(
                resolved,
                engine,
                RandomBatches(world),
                state=checkpoints.load(path, engine) if path else None,
                record=Record([collected]),
                checkpoints=checkpoints,
                validation=lambda: [batch_of(world, 4, seed=99)],
                preemption=Preemption(1e-9 if number < sessions else None, signals=False),
            )
            codes.append(train(parts, progress).exit_code)
    fields = {"step": ("step", "loss", "grad_norm", "applied"), "eval": ("step", "loss")}
    made = {kind: [[event[f] for f in names] for event in collected.of_kind(kind)] for kind, names in fields.items()}
    losses = {path.name: read_manifest(path)["validation_loss"] for path in by_step(Path(folder))}
    return made | {"codes": codes, "losses": losses}


def flip(path: Path, at: int = -200) -> None:
    """Change one bit of a file. at: an index of its bytes."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


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


class _Touched:
    """Counts, for the whole process, how often files in a folder are looked for, listed or opened by Python."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self.found = Counter[tuple[str, str]]()
        sys.addaudithook(lambda event, given: self.note(event, given[0]) if event in _EVENTS else None)
        stat = os.stat

        def noted(path: Any, **options: Any) -> os.stat_result:
            self.note("stat", path)
            return stat(path, **options)

        os.stat = noted  # type: ignore[assignment]

    def note(self, event: str, path: Any) -> None:
        if self._folder is not None and isinstance(path, str | Path) and Path(path).is_relative_to(self._folder):
            self.found[event, Path(path).relative_to(self._folder).as_posix()] += 1

    @contextmanager
    def within(self, folder: Path) -> Iterator[Counter[tuple[str, str]]]:
        """The events of this block, by kind and path from `folder`."""
        self._folder, self.found = folder, Counter()
        try:
            yield self.found
        finally:
            self._folder = None


_EVENTS = ("open", "os.listdir", "os.scandir")


@cache
def _touched() -> _Touched:
    return _Touched()  # an audit hook stays


def resumed(world: World, *, folder: str, stage: int) -> dict[str, Counter[tuple[str, str]]]:
    """The files of its checkpoint that a rank touches while it is chosen, and while it is loaded."""
    with engine_of(world, resolve(world, stage=stage, compute="bf16")) as engine:
        checkpoints = Checkpoints(Path(folder), keep=Retention(2), identity={"stage": stage}, world=world)
        with _touched().within(Path(folder) / "step-1") as choosing:
            path = checkpoints.find("auto")
        with _touched().within(Path(folder) / "step-1") as loading:
            progress = restored(checkpoints, path, engine)
        assert progress.step == 1
    return {"choosing": choosing, "loading": loading}


def agreed(world: World, *, broken: bool) -> Any:
    """The files and layouts of ranks of which each has one tensor table of its own, and one that all have."""
    tables = {layout_of(table): table for table in ({"a": ("float32", [world.rank])}, {"b": ("int64", [])})}
    written = {f"{number}-{world.rank}.pt": Written("0", 1, world.rank, layout) for number, layout in enumerate(tables)}
    error = "rank 1 cannot write" if broken and world.rank == 1 else None
    files: Any = SimpleNamespace(written=written, layouts=tables, error=error, finite=True)
    try:
        return agree_on_files(world.on_own_group(), files, Path("step-1"))
    except SaveFailed as failure:
        return str(failure)


def opened_without_network(world: World) -> str:
    """The error of a run that starts where gloo finds no network after training's group has connected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
        return refused(session(resolve(world, stage=2, compute="bf16"), world=world, trains=True).__enter__)
