"""Checkpoints that are complete or absent; docs/checkpoints.md describes their files.

A checkpoint is written to a hidden folder next to it, each file hashed while it is written, flushed to disk and
published by one rename, so a kill at any moment leaves the previous one in place. Training continues meanwhile.
"""

import contextlib
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from config.errors import UserError, one_line
from config.printable import tell
from training.checkpoint import commit, contents
from training.checkpoint.choice import Lineage, candidates, choice_remark, newest
from training.checkpoint.manifest import (
    MANIFEST,
    STATE,
    Damaged,
    check_hashes,
    find_problem,
    problem_of,
    read_state,
    shares_of,
)
from training.checkpoint.outcome import Saved, SaveFailed, on_main
from training.checkpoint.reader import PLAIN, Opener
from training.checkpoint.reshard import restore
from training.checkpoint.retention import Retention, loss_in, read_lock
from training.checkpoint.save import Save
from training.checkpoint.store.remote import Remote
from training.checkpoint.writer import Files
from training.distributed import World
from training.engine import Engine
from training.engine.rng import load_generators
from training.progress import Progress


class Checkpoints:
    """The checkpoints folder of one run. Every method is a collective."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: Retention,
        identity: dict[str, Any],
        world: World,
        run_name: str = "",
        background: bool = True,
        verify_after_save: bool = False,
        opener: Opener = PLAIN,
        remote: Remote | None = None,
        save_world: World | None = None,
    ) -> None:
        """identity: settings that a checkpoint must share with the run that loads it, as plain types by name. run_name:
        sealed into every manifest, for messages. save_world: `world` on a group of its own, else made by the first
        save."""
        self.folder, self.keep, self.identity, self.world = folder, keep, identity, world
        self.background, self.verify_after_save = background, verify_after_save
        self._opener, self._remote = opener, remote
        self.any_saved = False
        """Whether there is a checkpoint to roll back to, or one is being written."""
        self.found_loss: float | None = None
        """The validation loss of the last checkpoint found."""
        self.failures = 0
        """Saves that failed since the last successful one."""
        self.last_failure = ""
        self._lineage = Lineage(folder, run_name)
        self._save: Save | None = None
        self._outcomes: list[Saved | SaveFailed] = []
        self._save_world = save_world
        self._started = False
        self._notes: list[str] = []
        self._verified: set[Path] = set()

    def start_save(self, engine: Engine, state: dict[str, Any], validation_loss: float | None = None) -> None:
        """Copy the state, after any save in progress, then write, publish and prune in the background; `outcomes` has
        the result. state: plain types, returned by `load`, `progress` among them. validation_loss: [nats] of these
        weights."""
        self._collect_outcome()
        progress = Progress(**state["progress"])
        started, key = time.perf_counter(), self._opener.key
        self.reached("begin")
        final = self.folder / f"step-{progress.step}"
        partial = commit.partial_of(final)

        def begin() -> None:
            commit.begin(final)
            self._lineage.begin_save()

        try:
            on_main(self.world, begin, final)
        except SaveFailed as failure:
            self._note_outcome(failure)
            return
        self._verified.discard(final)
        files = Files(partial, rank=self.world.rank, reached=self.reached, copied=self.background, key=key)
        contents.save_state(files, partial, engine, {**state, "identity": self.identity})
        if self._save_world is None:
            self._save_world = self.world.on_own_group()
        self._save = Save(
            final=final,
            files=files,
            world=self._save_world,
            reached=self.reached,
            manifest=contents.manifest_of(engine, progress, validation_loss, key) | self._lineage.fields(),
            retention=self.keep,
            verify=self.verify_after_save,
            remote=self._remote,
            started=started,
        )
        self.any_saved = True  # set right away: the guard's choices must not depend on the speed of a disk
        if not self.background:
            self._save.published.wait()
        self._save.stall_seconds = time.perf_counter() - started

    @property
    def save_ended(self) -> bool:
        """Whether this rank's part of a save has finished since the last `outcomes` call."""
        return self._save is not None and self._save.ended

    def outcomes(self) -> list[Saved | SaveFailed]:
        """The results of the saves since the last call; waits for one that is in progress."""
        self._collect_outcome()
        ended, self._outcomes = self._outcomes, []
        return ended

    def take_notes(self) -> list[str]:
        """Lines for the record since the last call: checkpoints passed over, layouts converted."""
        lines, self._notes = self._notes, []
        return lines

    def find(self, resume: str, *, beside: Collection[Path] = ()) -> Path | None:
        """The checkpoint that `run.resume` asks for, on every rank, or None to start from scratch. If it leaves a
        choice, unusable ones are passed over, each with a line that says why. beside: damaged ones in the folder, which
        the store may have intact. Raises UserError if all of them are unusable."""
        self._collect_outcome()
        if resume == "never":
            return None
        refused, damaged = dict[Path, str](), list[Path]()
        starts, self._started = not self._started or bool(beside), True
        if resume == "auto" and self._remote is not None and starts:  # later the folder has this session's own saves
            refused |= self._remote.fetch(self.world, self.folder, beside)
        chosen, paths = self.world.on_main(lambda: self._candidates(resume))
        for path in paths:
            problem, differs = self._check(path, of_any_run=not chosen)
            if problem is None:
                for old in damaged if self.world.is_main else ():  # only now: without a substitute each start says so
                    commit.rename_damaged(old)
                self._notes += [self._log(f"passed over checkpoint {text}") for text in refused.values()]
                self.any_saved = self._continue_from(path, refused if chosen else None, record=resume != "auto")
                if starts and resume == "auto" and self._remote is not None:
                    self._make_up(self._remote, path)
                return path
            refused[path] = f"{path}: {problem}"
            damaged += [path] * (differs and resume == "auto")
        if damaged and self._remote is not None and not beside:
            self._notes.append(self._log(f"{refused[damaged[0]]}; checkpoint.dir may have another copy"))
            return self.find(resume, beside=damaged)
        self.any_saved = False
        if refused:
            further = f" ({len(refused) - 1} older ones cannot be used either)" if len(refused) > 1 else ""
            raise UserError(next(iter(refused.values())) + further)
        if resume != "auto":
            raise UserError(
                f"run.resume = {resume}: no complete checkpoint there; give a checkpoints/step-N folder, auto or never"
            )
        return None

    def load(self, path: Path, engine: Engine) -> dict[str, Any]:
        """Restore engine and random generators, but not the loss scaler; returns the saved state. Raises UserError."""
        problem = None if path in self._verified else self._check(path)[0]
        if problem is not None:
            raise UserError(f"{path}: {problem}")
        state = self.world.from_main(read_state(path) if self.world.is_main else None)
        difference = contents.parameter_difference(state["parameters"], contents.parameter_shapes(engine.model))
        if difference is not None:
            raise UserError(f"{path}: {difference}")
        # one file per sequence: ranks that share matrices have equal generators
        rank, step = self.world.zero_rank, state["progress"]["step"]
        source = rank * int(state["identity"].get("parallel.tensor", 1))
        with read_lock(path):
            change, opener = contents.layout_difference(state["identity"], self.identity), self._opener
            line = restore(engine, path, recorded=state.get("checksums"), change=change, opener=opener)
            generators = path / f"rng-rank-{source}.pt"
            saved = opener.read(generators) if generators.exists() else None
            seed = f"{self.identity.get('run.seed')}/{step}/{rank}"
            load_generators(saved, self.world.device, fallback_seed=seed)
        attention = contents.attention_difference(state["identity"], self.identity)
        for text in (line, attention and f"checkpoint {path}: {attention}"):
            if text:
                self._notes.append(self._log(text))
        return state

    def reached(self, phase: str) -> None:
        """Called on each rank when a save reaches `phase` (listed in docs/checkpoints.md); tests kill it here."""

    def _candidates(self, resume: str) -> tuple[bool, list[Path]]:
        """Whether there is a choice (False: one is given by its path), and the candidates, best first."""
        commit.recover(self.folder)
        if resume == "auto":
            return True, candidates(self.folder)
        try:
            given = Path(resume).expanduser()
            if any((given / name).is_file() for name in (MANIFEST, STATE)):
                return False, [given]
        except (OSError, RuntimeError) as error:  # a RuntimeError for ~nobody
            reason = f"cannot be read ({one_line(error, 120)}); give a checkpoints/step-N folder, auto or never"
            raise UserError(f"run.resume = {resume}: {reason}") from error
        return True, candidates(given) or candidates(given / "checkpoints")

    def _continue_from(self, path: Path, passed_over: dict[Path, str] | None, *, record: bool) -> bool:
        """Note that the run continues from `path`, and whether that goes back; returns whether it is the run's own.
        passed_over: the newer candidates; None
        if `path` was given, not chosen. record: write it to the folder now, in case the run ends before its next save.
        A collective. Raises UserError when that cannot be written."""
        in_store = self._remote.orders(self.world) if self._remote is not None and record else []

        def continue_from() -> tuple[str | None, bool]:
            remark = choice_remark(path, passed_over) if passed_over is not None else None
            try:
                own = self._lineage.continue_from(path, in_store, record=record)
            except OSError as error:
                reason = f"cannot be written ({error.strerror or error}); free space or change run.dir"
                raise UserError(f"{self.folder}: {reason}") from error
            return remark, own

        remark, own = self.world.on_main(continue_from)
        if remark is not None:
            self._notes.append(self._log(remark))
        return own

    def _make_up(self, remote: Remote, path: Path) -> None:
        """Upload the checkpoint that a session starts from if its upload failed in an earlier one."""
        try:
            uploaded = remote.make_up(self._save_world or self.world, path)
        except SaveFailed as failure:
            self._note_outcome(failure)
        else:
            self._notes += [self._log(uploaded)] if uploaded else []

    def _check(self, path: Path, *, of_any_run: bool = True) -> tuple[str | None, bool]:
        """Why the run cannot resume from `path`, or None; and whether it is damaged. Remembers usable ones."""
        world, found = self.world, dict[str, Any]()

        def read(manifest: dict[str, Any]) -> None:
            check_hashes(path, manifest, [STATE])
            found.update(files=manifest["files"], identity=read_state(path)["identity"], loss=loss_in(manifest))

        problem = find_problem(path, read, of_any_run=of_any_run) if world.is_main else None
        problem, found = world.from_main((problem, found))
        if problem is None:
            mine = shares_of(found, world.world_size)[world.rank]
            problems = world.gather_objects(problem_of(lambda: check_hashes(path, found, mine), path))
            problem = next(filter(None, problems), None)
        if problem is not None:
            return str(problem), isinstance(problem, Damaged)
        difference = contents.identity_difference(found["identity"], self.identity)
        if difference is None:
            self._verified.add(path)
            self.found_loss = found["loss"]
        return difference, False

    def _collect_outcome(self) -> None:
        """Wait for the save in progress, if any, and note its outcome. Called at the same point on all ranks."""
        if self._save is not None:
            save, self._save = self._save, None
            self._note_outcome(save.outcome())

    def _note_outcome(self, outcome: Saved | SaveFailed) -> None:
        self._outcomes.append(outcome)
        if isinstance(outcome, Saved):
            self.failures = 0
            return
        self.failures, self.last_failure = self.failures + 1, str(outcome)
        with contextlib.suppress(UserError):  # the folder cannot be read at the moment
            self.any_saved = self.world.on_main(lambda: newest(self.folder) is not None)
        self._log(f"{outcome}; earlier checkpoints are unchanged")

    def _log(self, text: str) -> str:
        if self.world.is_main:
            tell(text)
        return text
