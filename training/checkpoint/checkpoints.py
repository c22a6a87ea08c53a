"""Checkpoints that are whole or not there.

    checkpoints/step-60/
        manifest.json    every file with its SHA-256, size and tensors; sealed with a hash of its own
        state.json       progress, loss scaler, guard, identity of the run
        rng-rank-0.pt    generators of each rank
        deepspeed/       DeepSpeed's own sharded checkpoint: parameters, masters, moments
    checkpoints/LATEST   name of the newest one

A checkpoint is written in a hidden folder beside, each file hashed while it is written, flushed to disk and published
by one rename, so a kill at any moment leaves the previous one in place. Training goes on meanwhile.
`python -m training.checkpoint --help` looks at them from outside; docs/checkpoints.md describes them for other tools.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.errors import UserError
from training.checkpoint import commit
from training.checkpoint.contents import (
    manifest_of,
    other_identity,
    other_layout,
    other_parameters,
    parameter_shapes,
    take,
)
from training.checkpoint.manifest import (
    MANIFEST,
    STATE,
    Damaged,
    candidates,
    check_hashes,
    flaw,
    newest,
    read_state,
    share,
)
from training.checkpoint.outcome import Saved, SaveFailed, on_main
from training.checkpoint.reader import Opener
from training.checkpoint.reshard import restore
from training.checkpoint.retention import Retention, being_read
from training.checkpoint.save import Order, Save
from training.checkpoint.writer import Files
from training.distributed import World
from training.engine import Engine
from training.engine.rng import load_generators
from training.progress import Progress

if TYPE_CHECKING:
    from training.checkpoint.store.remote import Remote  # brings fsspec, which most runs do not need


class Checkpoints:
    """The checkpoints folder of one run. Every method is a collective."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: Retention,
        identity: dict[str, Any],
        world: World,
        background: bool = True,
        verify_after_save: bool = False,
        opener: Opener | None = None,
        remote: Remote | None = None,
    ) -> None:
        """identity: what a checkpoint must share with the run that loads it, as plain types by name.
        background: copy what is saved to host memory and write it behind training, instead of holding training up.
        verify_after_save: read each checkpoint back from the disk before it counts as saved.
        opener: with the key that files are encrypted and read with; None: plain files.
        remote: where every checkpoint goes as well; the folder then holds what is on its way there and back.
        """
        self.folder, self.keep, self.identity, self.world = folder, keep, identity, world
        self.background, self.verify_after_save = background, verify_after_save
        self._opener, self._remote = opener, remote
        self.any_saved = False
        """Whether there is a checkpoint to go back to, one that is being written included."""
        self.failures = 0
        """Saves that failed since the last one that did not."""
        self.last_failure = ""
        """Why the newest of them failed, in one line."""
        self._save: Save | None = None
        self._ended: list[Saved | SaveFailed] = []
        self._beside: World | None = None
        self._asked = False
        self._untold: list[str] = []
        self._sound: set[Path] = set()

    def start_save(self, engine: Engine, state: dict[str, Any], validation_loss: float | None = None) -> None:
        """Take what is to be saved, and write, publish and retain behind training; `outcomes` says what came of it.

        A save that is under way is waited for first. state: plain types, given back by `load`, `progress` among them.
        validation_loss: nats, of exactly these weights.
        """
        self._conclude()
        progress = Progress.from_state_dict(state["progress"])
        started, key = time.perf_counter(), self._opener.key if self._opener else None
        self.reached("begin")
        final, partial = self.folder / f"step-{progress.step}", commit.partial_of(self.folder, progress.step)
        try:
            on_main(self.world, lambda: commit.begin(self.folder, progress.step), final)
        except SaveFailed as failure:
            self._note_outcome(failure)
            return
        self._sound.discard(final)
        files = Files(partial, rank=self.world.rank, reached=self.reached, copied=self.background, key=key)
        take(files, partial, engine, {**state, "identity": self.identity})
        if self._beside is None:
            self._beside = self.world.on_own_group()
        order = Order(
            final=final,
            partial=partial,
            step=progress.step,
            tokens=progress.tokens,
            manifest=manifest_of(engine, progress, validation_loss, key),
            retention=self.keep,
            verify=self.verify_after_save,
            private=key is not None,
            remote=self._remote,
            started=started,
        )
        self._save = Save(order, files, self._beside, self.reached)
        self.any_saved = True  # not when it has ended: what the guard may do would depend on how fast a disk is
        if not self.background:
            self._save.wait_until_published()
        self._save.stall_seconds = time.perf_counter() - started

    @property
    def save_ended(self) -> bool:
        """Whether this rank's part of a save has come to its end since `outcomes` was last asked."""
        return self._save is not None and self._save.ended

    def outcomes(self) -> list[Saved | SaveFailed]:
        """What came of the saves since this was last asked; one that is under way is waited for."""
        self._conclude()
        ended, self._ended = self._ended, []
        return ended

    def save(self, engine: Engine, state: dict[str, Any]) -> Saved:
        """The same as `start_save`, waited for.

        Raises SaveFailed on every rank when any of them cannot write; what was published before is untouched.
        """
        self.start_save(engine, state)
        outcome = self.outcomes()[-1]
        if isinstance(outcome, SaveFailed):
            raise outcome
        return outcome

    def settle(self) -> list[str]:
        """What there is to record of the checkpoints that `find` passed over, a line each."""
        lines, self._untold = self._untold, []
        return lines

    def find(self, resume: str) -> Path | None:
        """The checkpoint that `run.resume` asks for, or None to start anew. The same answer on every rank.

        Files are hashed, a share on each rank. One that is damaged or of another run is passed over, with a line that
        says why, where `run.resume` leaves a choice. Raises UserError when none of those that are there can be used.
        """
        self._conclude()
        if resume == "never":
            if self._remote is not None:
                self._remote.require_empty(self.world)
            return None
        if resume == "auto" and self._remote is not None and not self._asked:
            self._asked = True  # once: later the folder has what this session saved, store or no store
            self._remote.fetch(self.world, self.folder, lambda text: self._untold.append(self._tell(text)))
        refused: list[str] = []
        for path in self.world.from_main(self._choice(resume) if self.world.is_main else None):
            problem, damaged = self._examine(path)
            if problem is None:
                self._untold += [self._tell(f"passed over checkpoint {text}") for text in refused]
                self.any_saved = True
                return path
            refused.append(f"{path}: {problem}")
            if damaged and resume == "auto" and self.world.is_main:
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

    def load(self, path: Path, engine: Engine) -> dict[str, Any]:
        """Restore engine and random generators, the loss scaler aside; gives what `save` was given as `state`.

        Raises UserError when the checkpoint is damaged or of another run's identity.
        """
        problem = None if path in self._sound else self._examine(path)[0]
        if problem is not None:
            raise UserError(f"{path}: {problem}")
        state = self.world.from_main(read_state(path) if self.world.is_main else None)
        other = other_parameters(state["parameters"], parameter_shapes(engine.model))
        if other is not None:
            raise UserError(f"{path}: {other}")
        rank, step = self.world.rank, state["progress"]["step"]
        with being_read(path):
            change = other_layout(state["identity"], self.identity)
            opener = self._opener or Opener()
            line = restore(engine, path, recorded=state.get("checksums"), change=change, opener=opener)
            drawn = path / f"rng-rank-{rank}.pt"
            otherwise = f"{self.identity.get('run.seed')}/{step}/{rank}"
            load_generators(opener.read(drawn) if drawn.exists() else None, self.world.device, otherwise=otherwise)
        if line:
            self._untold.append(self._tell(line))
        return state

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
        world = self.world

        def hash_my_share(manifest: dict[str, Any]) -> None:
            check_hashes(path, manifest, share(manifest, world.rank, world.world_size))

        for found in world.gather_objects(flaw(path, hash_my_share)):
            if found is not None:
                return str(found), isinstance(found, Damaged)
        theirs = world.from_main(read_state(path)["identity"] if world.is_main else None)
        other = other_identity(theirs, self.identity)
        if other is None:
            self._sound.add(path)
        return other, False

    def _conclude(self) -> None:
        """Take in what came of the save under way, if there is one. All ranks come here at the same point."""
        if self._save is not None:
            save, self._save = self._save, None
            self._note_outcome(save.outcome())

    def _note_outcome(self, outcome: Saved | SaveFailed) -> None:
        self._ended.append(outcome)
        if isinstance(outcome, Saved):
            self.failures = 0
            if outcome.verified:
                self._sound.add(outcome.path)
            return
        self.failures, self.last_failure = self.failures + 1, str(outcome)
        self.any_saved = bool(self.world.from_main(newest(self.folder) is not None if self.world.is_main else None))
        self._tell(f"{outcome}; the checkpoints before it are as they were")

    def _tell(self, text: str) -> str:
        if self.world.is_main:
            print(f"mantissa: {text}", file=sys.stderr, flush=True)
        return text
