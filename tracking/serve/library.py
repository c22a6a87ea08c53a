"""Find the runs in a folder, read them, and keep them up to date in the background.

A run is a folder with an `events.jsonl`, at most DEPTH levels below the root. Its key is its path relative to the root,
and only keys of known runs are ever looked up, so a request cannot name an arbitrary path. Links that lead out of the
root are not followed.
"""

import json
import math
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from config.errors import UserError, one_line
from config.redact import redact
from tracking.compare.differences import CHANGE_NO_NUMBER, flat
from tracking.figures import HEADLINES, followed
from tracking.live import LiveRun, sketch
from tracking.run_dir import RunDir, setting
from tracking.run_facts import RunFacts
from tracking.run_lock import LOCK
from tracking.serve.notes import NOTES, Notes, read_notes, write_notes
from tracking.status import Status, run_status
from tracking.verdict import Verdict

DEPTH = 3
"""Maximum search depth below the root; the trials of a sweep are two levels deep."""
MOST_RUNS = 2000
POINTS = 60
"""Number of places in a file at which the overview's curve is sampled."""
_REFRESH_S = 2.0
_LOOK_S = 5.0  # interval between searches for new folders
_CHECK_S = 10.0  # interval between checks of a run's process while its events do not change
_OPEN_RUNS = 4  # maximum number of whole runs in memory
_PASSED_OVER = frozenset({"checkpoints", "plots", "wandb", "profile"})
_INSIDE_A_RUN = _PASSED_OVER | {"rollouts", "tensorboard"}
_FEW_BROKEN = 3  # with fewer steps since the first non-finite loss, the last finite one is shown


@dataclass(frozen=True)
class Entry:
    """One run as shown in the overview."""

    key: str
    """Path of the run relative to the root, which is also its name."""
    folder: Path
    facts: RunFacts
    """Facts without per-step columns."""
    status: Status
    verdict: Verdict
    followed: str
    """Name of the measure in `curve`: the loss or a reward."""
    curve: np.ndarray
    """Step and finite value at about POINTS steps, shape (points, 2)."""
    settings: dict[str, Any]
    """Dotted key to value for the settings that may affect results, without secrets."""
    hypothesis: str
    planned: int | None
    group: str
    """The settings without the seed, as text that repeats have in common; empty without a config."""
    changed: float
    """[seconds since the epoch] Modification time of its events."""
    notes: Notes = Notes()

    @property
    def newest(self) -> float:
        """The newest value, or the newest finite one if only a few steps have been non-finite since."""
        step, broken = self.facts.newest, self.facts.evidence.not_finite_since
        _, value = followed(step)
        lasting = broken is not None and step.get("step", broken) - broken >= _FEW_BROKEN
        return value if math.isfinite(value) or lasting or not len(self.curve) else float(self.curve[-1, 1])


class _Run:
    """State of one run between two updates."""

    def __init__(self, key: str, folder: Path, root: Path) -> None:
        self.key, self.folder, self._root = key, folder, root
        self.live = LiveRun(folder, key, whole=False)
        self.entry: Entry | None = None
        self._seen: list[tuple[int, ...]] = []
        self._checked = 0.0

    def update(self, now: float) -> None:
        """Refresh the run. Raises OSError or UserError if it cannot be read."""
        events = self.folder / "events.jsonl"
        changed = events.stat().st_mtime
        seen = [_stamp(path) for path in (events, self.folder / NOTES)]
        if seen == self._seen and now - self._checked < _CHECK_S and self.entry is not None:
            return
        self._checked = now
        status = run_status(self.folder)
        if seen == self._seen and self.entry is not None and self.entry.status == status:
            return
        self.live.read()
        notes = Notes()
        with suppress(UserError):  # reported when the notes are opened
            notes = read_notes(self.folder) if is_inside(self.folder / NOTES, self._root) else notes
        try:
            require_inside(self.folder, self._root)
            facts = self.live.known_facts()
        except UserError:
            facts = replace(self.live.events(), checked=status)
        config = redact(facts.config)
        settings = {key: value for key, value in flat(config) if not key.startswith(CHANGE_NO_NUMBER)}
        alike = {key: value for key, value in settings.items() if key != "run.seed"}
        steps = setting(config, "run.steps")
        drawn = sketch(self.folder, self.key, POINTS).columns
        values = next((drawn.metrics[name] for name in drawn.metrics if name in HEADLINES), drawn.loss)
        finite = np.isfinite(values)
        self.entry = Entry(
            key=self.key,
            folder=self.folder,
            facts=facts,
            status=status,
            verdict=facts.verdict,
            followed=followed(facts.newest)[0],
            curve=np.stack([drawn.step[finite], values[finite]], axis=1),
            settings=settings,
            hypothesis=str(setting(config, "run.hypothesis") or ""),
            planned=steps if isinstance(steps, int) else None,
            group=json.dumps(alike, sort_keys=True, default=str) if settings else "",
            changed=changed,
            notes=notes,
        )
        self._seen = seen


def _stamp(path: Path) -> tuple[int, ...]:
    """A value that changes whenever a file does; empty if there is none."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_entry(folder: Path) -> Entry:
    """Entry for one run folder, following any links in it. Raises OSError or UserError if it cannot be read."""
    run = _Run(folder.name, folder, Path(folder.anchor))
    run.update(time.monotonic())
    assert run.entry is not None, "the first look makes it"
    return run.entry


class Library:
    """All runs below a folder. `start` keeps them up to date from a thread; all methods are thread-safe."""

    def __init__(self, root: Path, *, depth: int = DEPTH) -> None:
        """Raises UserError if there is no such folder."""
        self._depth = depth
        if not root.is_dir():
            raise UserError(f"{root}: there is no such folder; give one that holds run folders, such as runs/")
        self.root = root.resolve()
        self.left_out = 0
        """Number of runs beyond MOST_RUNS."""
        self.unread: dict[str, str] = {}
        """Keys of runs that are not read: empty text if not yet, else why they cannot be."""
        self._runs: dict[str, _Run] = {}
        self._open: dict[str, LiveRun] = {}
        self._lock = threading.Lock()
        self._looked = -_LOOK_S

    def start(self) -> None:
        """Keep the runs up to date until the process ends."""
        threading.Thread(target=self._look_after, daemon=True, name="library").start()

    def entries(self) -> list[Entry]:
        """All runs that have been read, most recently changed first."""
        with self._lock:
            found = [run.entry for run in self._runs.values() if run.entry is not None]
        return sorted(found, key=lambda entry: -entry.changed)

    def entry(self, key: str) -> Entry | None:
        """One run; None for an unknown key."""
        with self._lock:
            run = self._runs.get(key)
        return run.entry if run is not None else None

    def live(self, entry: Entry) -> LiveRun:
        """The whole run, for reading its events. The most recently used few stay in memory."""
        with self._lock:
            live = self._open.pop(entry.key, None) or LiveRun(entry.folder, entry.key)
            self._open[entry.key] = live  # most recently used last
            while len(self._open) > _OPEN_RUNS:
                del self._open[next(iter(self._open))]
        return live

    def note(self, key: str, notes: Notes) -> None:
        """Replace a run's notes. Raises KeyError for an unknown key, OSError or UserError if it cannot be done."""
        with self._lock:
            run = self._runs[key]
            if run.entry is None:
                raise KeyError(key)
            require_inside(run.folder, self.root)
            write_notes(run.folder, notes)
            run.entry = replace(run.entry, notes=notes)

    def look(self) -> None:
        """Search for runs, if due, and update each of them once."""
        if time.monotonic() - self._looked >= _LOOK_S:
            self._find()
            self._looked = time.monotonic()
        with self._lock:
            runs = list(self._runs.values())
        for run in sorted(runs, key=lambda run: run.entry is not None):
            try:
                run.update(time.monotonic())
                self.unread.pop(run.key, None)
            except Exception as problem:  # one damaged run must not stop the others
                self.unread[run.key] = one_line(problem, 200)

    def _look_after(self) -> None:
        while True:
            self.look()
            time.sleep(_REFRESH_S)

    def _find(self) -> None:
        found = dict(self._folders())
        kept = dict(list(found.items())[:MOST_RUNS])
        self.left_out = len(found) - len(kept)
        with self._lock:
            for key in self._runs.keys() - kept.keys():
                del self._runs[key]
                self.unread.pop(key, None)
            for key, folder in kept.items():
                if key not in self._runs:
                    self._runs[key] = _Run(key, folder, self.root)
                    self.unread[key] = ""

    def _folders(self) -> Iterable[tuple[str, Path]]:
        for folder, below, files in os.walk(self.root, followlinks=False):
            path = Path(folder)
            parts = path.relative_to(self.root).parts
            passed_over = _INSIDE_A_RUN if "events.jsonl" in files else _PASSED_OVER
            if "events.jsonl" in files and is_inside(path / "events.jsonl", self.root):
                yield "/".join(parts) or ".", path
            deep = len(parts) >= self._depth
            below[:] = [] if deep else sorted(name for name in below if name not in passed_over)


def require_inside(folder: Path, root: Path) -> None:
    """Raise UserError if a file of the run folder is a link that leads out of `root`."""
    run_dir = RunDir(folder)
    for path in (
        *(run_dir.events, run_dir.config, run_dir.deepspeed_config, run_dir.environment),
        *(run_dir.plots / "run.png", run_dir.sample, folder / LOCK, folder / NOTES),
    ):
        if not is_inside(path, root):
            raise UserError(f"{path.name} of this run is a link that leads out of the runs' folder; it is not read")


def is_inside(path: Path, root: Path) -> bool:
    """Whether a path is inside `root` after resolving links."""
    try:
        return path.resolve().is_relative_to(root)
    except (OSError, RuntimeError):
        return False
