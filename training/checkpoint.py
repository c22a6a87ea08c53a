"""Checkpoints that are whole or not there.

    checkpoints/step-60/
        manifest.json    every file with its SHA-256, size and tensors; sealed with a hash of its own
        state.json       progress, loss scaler, guard, identity of the run
        rng-rank-0.pt    generators of each rank
        deepspeed/       DeepSpeed's own sharded checkpoint: parameters, masters, moments
    checkpoints/LATEST   name of the newest one

A checkpoint is written in a hidden folder beside, each file hashed while it is written, flushed to disk and published
by one rename, so a kill at any moment leaves the previous one in place. `python -m training.checkpoint --help` looks at
them from outside; docs/checkpoints.md describes them for other tools.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from config.errors import UserError
from training import checkpoint_commit as commit
from training.checkpoint_identity import other_identity, other_parameters, parameter_shapes
from training.checkpoint_manifest import (
    FORMAT,
    MANIFEST,
    STATE,
    Damaged,
    Written,
    candidates,
    check_hashes,
    flaw,
    is_whole,
    newest,
    newest_before,
    read_state,
    share,
)
from training.checkpoint_readback import ReadBack
from training.generators import generators, restore_generators
from training.progress import Progress

if TYPE_CHECKING:
    from training.distributed import Place
    from training.engine import Engine

__all__ = ["Checkpoints", "SaveFailed", "Saved", "is_whole", "newest", "newest_before", "read_state"]

TAG = "deepspeed"


class SaveFailed(OSError):
    """A checkpoint could not be written; raised on every rank alike. One line: the rank, the file and the reason."""


@dataclass(frozen=True)
class Saved:
    """What a save did."""

    path: Path
    seconds: float
    bytes: int


class Checkpoints:
    """The checkpoints folder of one run. Every method is a collective."""

    def __init__(
        self, folder: Path, *, keep: int, identity: dict[str, Any], place: Place, verify_after_save: bool = False
    ) -> None:
        """identity: what a checkpoint must share with the run that loads it, as plain types by name.
        verify_after_save: read each checkpoint back in the background; `settle` tells what came of it."""
        self.folder, self.keep, self.identity, self.place = folder, keep, identity, place
        self.verify_after_save = verify_after_save
        self.any_saved = False
        """Whether there is a checkpoint to go back to."""
        self.failures = 0
        """Saves that failed since the last one that did not."""
        self._untold: list[str] = []
        self._sound: set[Path] = set()
        self._read_back: ReadBack | None = None

    def save(self, engine: Engine, progress: Progress, state: dict[str, Any]) -> Saved:
        """Write, publish, and drop all but the newest `keep`.

        Raises SaveFailed on every rank when any of them cannot write; what was published before is untouched.
        """
        started = time.perf_counter()
        final, partial = self.folder / f"step-{progress.step}", commit.partial_of(self.folder, progress.step)
        try:
            self.reached("begin")
            self._on_main(lambda: commit.begin(self.folder, progress.step), partial)
            files = self._write(partial, engine, progress, state)
            size = self._on_main(lambda: self._publish(partial, final, engine, progress, files), final)
        except SaveFailed as failure:
            self.failures += 1
            if self.place.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            self._tell(f"{failure}; the checkpoints before it are as they were")
            raise
        self.any_saved, self.failures = True, 0
        self._sound.discard(final)
        if self.verify_after_save:
            self._read_back = ReadBack(final, rank=self.place.rank, files=files)
        return Saved(final, time.perf_counter() - started, size)

    def settle(self) -> list[str]:
        """What there is to record, a line each: checkpoints that `find` passed over, and what came of reading the last
        save back, which is waited for. One that does not read back as it was written is set aside and never chosen.
        """
        lines, self._untold = self._untold, []
        if self._read_back is None:
            return lines
        path, problem, read = self._read_back.wait()
        self._read_back = None
        problems = self.place.gather_objects((problem, read))
        found = next((text for text, _ in problems if text), None)
        if found is None:
            self._sound.add(path)
            return [*lines, f"checkpoint {path} read back: all hashes agree ({sum(n for _, n in problems):,} bytes)"]
        self.any_saved = bool(self._on_main(lambda: self._condemn(path), path))
        self.failures += 1
        return [*lines, self._tell(f"checkpoint {path} is not what was written and is set aside: {found}")]

    def find(self, resume: str) -> Path | None:
        """The checkpoint that `run.resume` asks for, or None to start anew. The same answer on every rank.

        Files are hashed, a share on each rank. One that is damaged or of another run is passed over, with a line that
        says why, where `run.resume` leaves a choice. Raises UserError when none of those that are there can be used.
        """
        if resume == "never":
            return None
        refused: list[str] = []
        for path in self.place.from_main(self._choice(resume) if self.place.is_main else None):
            problem, damaged = self._examine(path)
            if problem is None:
                self._untold += [self._tell(f"passed over checkpoint {text}") for text in refused]
                self.any_saved = True
                return path
            refused.append(f"{path}: {problem}")
            if damaged and resume == "auto" and self.place.is_main:
                commit.set_aside(path)
        self.any_saved = False
        if refused:
            further = f" ({len(refused) - 1} older ones cannot be used either)" if len(refused) > 1 else ""
            raise UserError(refused[0] + further)
        if resume != "auto":
            raise UserError(
                f"run.resume = {resume}: no whole checkpoint there; give a checkpoints/step-N folder, auto or never"
            )
        return None

    def load(self, path: Path, engine: Engine) -> tuple[Progress, dict[str, Any]]:
        """Restore engine and generators; gives the progress and what `save` was given as `state`.

        Raises UserError when the checkpoint is damaged or of another run's identity.
        """
        problem = None if path in self._sound else self._examine(path)[0]
        if problem is not None:
            raise UserError(f"{path}: {problem}")
        state = self.place.from_main(read_state(path) if self.place.is_main else None)
        other = other_parameters(state["parameters"], parameter_shapes(engine.model))
        if other is not None:
            raise UserError(f"{path}: {other}")
        engine.load(path, TAG, state["scaler"])
        restore_generators(torch.load(path / f"rng-rank-{self.place.rank}.pt", weights_only=True), self.place.device)
        return Progress.from_state_dict(state["progress"]), state["reactions"]

    def reached(self, phase: str) -> None:
        """Called on each rank as a save comes to `phase` (docs/checkpoints.md lists them): where a test kills it."""

    def _choice(self, resume: str) -> list[Path]:
        commit.tidy(self.folder)
        if resume == "auto":
            return candidates(self.folder)
        given = Path(resume).expanduser()
        if any((given / name).is_file() for name in (MANIFEST, STATE)):
            return [given]
        return candidates(given) or candidates(given / "checkpoints")

    def _examine(self, path: Path) -> tuple[str | None, bool]:
        """Why `path` cannot be gone on from, or None; and whether it is damaged. Remembers one that is sound."""
        place = self.place

        def hash_my_share(manifest: dict[str, Any]) -> None:
            check_hashes(path, manifest, share(manifest, place.rank, place.world_size))

        for found in place.gather_objects(flaw(path, hash_my_share)):
            if found is not None:
                return str(found), isinstance(found, Damaged)
        theirs = place.from_main(read_state(path)["identity"] if place.is_main else None)
        other = other_identity(theirs, self.identity)
        if other is None:
            self._sound.add(path)
        return other, False

    def _write(
        self, partial: Path, engine: Engine, progress: Progress, reactions: dict[str, Any]
    ) -> dict[str, Written]:
        """Every rank's files, on disk. Raises SaveFailed."""
        from training.checkpoint_writer import Files

        files = Files(partial, rank=self.place.rank, reached=self.reached)
        with files.written_by(engine.deepspeed):
            engine.save(partial, TAG)
        files.save(generators(self.place.device), partial / f"rng-rank-{self.place.rank}.pt")
        if self.place.is_main:
            state = {
                "progress": progress.state_dict(),
                "scaler": engine.scaler_state(),
                "reactions": reactions,
                "identity": self.identity,
                "parameters": parameter_shapes(engine.model),
            }
            files.save_text(json.dumps(state, indent=1) + "\n", partial / STATE)
        self.reached("written")
        everyone = self.place.gather_objects((files.written, files.error))
        for _, error in everyone:
            if error is not None:
                raise SaveFailed(f"checkpoint {partial.with_name(f'step-{progress.step}')} was not saved: {error}")
        return {name: file for written, _ in everyone for name, file in sorted(written.items())}

    def _publish(
        self, partial: Path, final: Path, engine: Engine, progress: Progress, files: dict[str, Written]
    ) -> int:
        commit.take_in(partial, files)
        regions = engine.regions.dtypes if engine.regions is not None else None
        manifest = {
            "format": FORMAT,
            "step": progress.step,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "world_size": self.place.world_size,
            "zero_stage": engine.stage,
            "precision": {"compute": engine.compute, "regions": regions},
            "data": {"position": progress.position, "tokens": progress.tokens},
            "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers")},
            "files": {name: file.as_plain() for name, file in files.items()},
        }
        size = commit.seal_folder(partial, manifest, self.reached)
        commit.publish(partial, final, self.reached)
        commit.retain(self.folder, final, self.keep, self.reached)
        self.reached("done")
        return size + sum(file.bytes for file in files.values())

    def _condemn(self, path: Path) -> bool:
        commit.set_aside(path)
        previous = newest(self.folder)
        if previous is not None:
            commit.name_latest(previous)
        return previous is not None

    def _on_main(self, act: Any, path: Path) -> Any:
        """What `act` gives on the main process, on every rank; raises SaveFailed on all when it meets an OSError."""
        value, error = None, None
        if self.place.is_main:
            try:
                value = act()
            except OSError as problem:
                error = f"checkpoint {path} was not saved: {problem}"
        value, error = self.place.from_main((value, error))
        if error is not None:
            raise SaveFailed(error)
        return value

    def _tell(self, text: str) -> str:
        if self.place.is_main:
            print(f"mantissa: {text}", file=sys.stderr, flush=True)
        return text


if __name__ == "__main__":
    from training.checkpoint_tool import main

    sys.exit(main(sys.argv[1:]))
