"""Checkpoints that are whole or not there.

    checkpoints/step-60/
        state.json       progress, loss scaler, identity of the run, sizes of all files
        rng-rank-0.pt    generators of each rank
        deepspeed/       DeepSpeed's own sharded checkpoint: parameters, masters, moments
    checkpoints/LATEST   name of the newest one

A checkpoint is written in a hidden folder beside, flushed to disk and published by one rename, so a kill at any moment
leaves the previous one in place. A folder whose files do not have the recorded sizes is never chosen.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from config.errors import UserError
from training.distributed import Place
from training.engine import Engine
from training.generators import generators, restore_generators
from training.progress import Progress

FORMAT = 1
TAG = "deepspeed"


@dataclass(frozen=True)
class Saved:
    """What a save did."""

    path: Path
    seconds: float
    bytes: int


class Checkpoints:
    """The checkpoints folder of one run. Every method is a collective."""

    def __init__(self, folder: Path, *, keep: int, identity: dict[str, Any], place: Place) -> None:
        """identity: what a checkpoint must share with the run that loads it, as plain types by name."""
        self.folder, self.keep, self.identity, self.place = folder, keep, identity, place
        self.any_saved = False
        """Whether there is a checkpoint to go back to."""

    def save(self, engine: Engine, progress: Progress, state: dict[str, Any]) -> Saved:
        """Write, publish, and drop all but the newest `keep`. Raises OSError on every rank if rank 0 cannot publish."""
        started = time.perf_counter()
        final = self.folder / f"step-{progress.step}"
        partial = self.folder / f".step-{progress.step}.partial"
        if self.place.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.place.wait_for_all()
        engine.save(partial, TAG)
        torch.save(generators(self.place.device), partial / f"rng-rank-{self.place.rank}.pt")
        self.place.wait_for_all()
        size, error = 0, None
        if self.place.is_main:
            try:
                size = self._publish(partial, final, engine, progress, state)
            except OSError as problem:
                error = f"checkpoint {final} could not be published: {problem}"
        size, error = self.place.from_main((size, error))
        if error:
            raise OSError(error)
        self.any_saved = True
        return Saved(final, time.perf_counter() - started, size)

    def find(self, resume: str) -> Path | None:
        """The checkpoint that `run.resume` asks for, or None to start anew. The same answer on every rank.

        Raises UserError when a path is given that holds no whole checkpoint.
        """
        answer: Path | str | None = self.place.from_main(self._find(resume) if self.place.is_main else None)
        if isinstance(answer, str):
            raise UserError(answer)
        self.any_saved = answer is not None
        return answer

    def load(self, path: Path, engine: Engine) -> tuple[Progress, dict[str, Any]]:
        """Restore engine and generators; gives the progress and what `save` was given as `state`.

        Raises UserError when the checkpoint is of another run's identity.
        """
        state = self.place.from_main(read_state(path) if self.place.is_main else None)
        for key, mine in self.identity.items():
            theirs = state["identity"].get(key)
            if theirs != mine:
                raise UserError(
                    f"{path}: {key} is {theirs} there and {mine} in this run; use the same {key}, or start anew with "
                    "run.resume=never or another run.name"
                )
        engine.load(path, TAG, state["scaler"])
        restore_generators(torch.load(path / f"rng-rank-{self.place.rank}.pt", weights_only=True), self.place.device)
        return Progress.from_state_dict(state["progress"]), state["reactions"]

    def _find(self, resume: str) -> Path | str | None:
        if resume == "never":
            return None
        if resume == "auto":
            for leftover in self.folder.glob(".step-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            return newest(self.folder)
        given = Path(resume).expanduser()
        for candidate in (given, newest(given), newest(given / "checkpoints")):
            if candidate is not None and (candidate / "state.json").is_file() and is_whole(candidate):
                return candidate
        return f"run.resume = {resume}: no whole checkpoint there; give a checkpoints/step-N folder, auto or never"

    def _publish(
        self, partial: Path, final: Path, engine: Engine, progress: Progress, reactions: dict[str, Any]
    ) -> int:
        files = {str(f.relative_to(partial)): f.stat().st_size for f in sorted(partial.rglob("*")) if f.is_file()}
        state = {
            "format": FORMAT,
            "progress": progress.state_dict(),
            "scaler": engine.scaler_state(),
            "reactions": reactions,
            "identity": self.identity,
            "files": files,
        }
        (partial / "state.json").write_text(json.dumps(state, indent=1) + "\n")
        for path in [partial, *partial.rglob("*")]:
            _flush(path)
        replaced = final.with_name(f".{final.name}.replaced")
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        _flush(self.folder)
        latest = self.folder / ".LATEST.partial"
        latest.write_text(final.name + "\n")
        _flush(latest)
        latest.replace(self.folder / "LATEST")
        _flush(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in _by_step(self.folder)[self.keep :]:
            if old != final:
                shutil.rmtree(old, ignore_errors=True)
        return sum(files.values())


def newest(folder: Path) -> Path | None:
    """The checkpoint LATEST names, or else the one of the highest step, that is whole; None if there is none."""
    candidates = _by_step(folder)
    latest = folder / "LATEST"
    if latest.is_file():
        named = folder / latest.read_text().strip()
        candidates = [named, *(c for c in candidates if c != named)]
    return next((c for c in candidates if is_whole(c)), None)


def newest_before(folder: Path, step: int) -> Path | None:
    """The whole checkpoint of the highest step below `step`; None if there is none."""
    return next((c for c in _by_step(folder) if int(c.name[5:]) < step and is_whole(c)), None)


def is_whole(path: Path) -> bool:
    """Whether every file that state.json records is there with its size."""
    try:
        files = read_state(path)["files"]
        return all((path / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a checkpoint."""
    return json.loads((path / "state.json").read_text())


def _by_step(folder: Path) -> list[Path]:
    found = [(int(p.name[5:]), p) for p in folder.glob("step-*") if p.name[5:].isdigit()]
    return [p for _, p in sorted(found, reverse=True)]


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
