"""A sweep's folder: the plan and the outcome of each trial.

    runs/<sweep>/sweep.json            the plan: every trial with its number, settings and complete run config
                 trials/003.json       the outcome of trial 3 so far, replaced atomically
                 logs/003.log          what it printed
                 <sweep>-003/          its run folder
                 sweep.md, results.json, compare.html

A trial keeps its number and folder if the sweep file changes: it is identified by its overrides.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from config.deepspeed.document import leaves
from config.errors import UserError
from config.files import write_atomically
from config.json_text import object_in
from config.load import show
from launch.sweep.file import Settings, Sweep, Trial
from launch.sweep.rule import Hopeless

Status = Literal["waiting", "running", "done", "hopeless", "diverged", "out of time", "stopped", "refused", "crashed"]
ENDED = ("done", "hopeless", "diverged", "out of time")
"""Statuses of trials that are not restarted; out of time: run.max_minutes is up. Of the others, refused is exit code 2
of train.py; crashed includes 74."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial so far."""

    status: Status = "waiting"
    reason: str = ""
    exit_code: int | None = None
    """Exit code of the run, even if its launcher turned it into 1."""
    starts: int = 0
    seconds: float = 0.0
    """[seconds] Total time of all its starts, each from the start of the launcher to the end of the last process."""


@dataclass(frozen=True)
class Entry(Trial):
    """A trial of the plan."""

    index: int
    name: str
    """Name of its run and run folder."""
    removed: bool = False
    """Whether it is no longer in the sweep file."""


@dataclass(frozen=True)
class Plan(Settings):
    """The content of sweep.json."""

    trials: tuple[Entry, ...]

    @property
    def current(self) -> list[Entry]:
        """The trials that are still in the sweep file."""
        return [entry for entry in self.trials if not entry.removed]

    def run_folder(self, entry: Entry) -> Path:
        return self.folder / entry.name

    def log_path(self, entry: Entry) -> Path:
        """Log with the output of all starts of a trial."""
        return self.folder / "logs" / f"{entry.index:03d}.log"

    def outcome(self, entry: Entry) -> Outcome:
        return Outcome(**object_in(self._record(entry)))

    def record(self, entry: Entry, outcome: Outcome) -> None:
        write_json_atomically(self._record(entry), dataclasses.asdict(outcome))

    def _record(self, entry: Entry) -> Path:
        return self.folder / "trials" / f"{entry.index:03d}.json"


def prepare(sweep: Sweep) -> tuple[Plan, list[str]]:
    """Write the plan of a sweep, merged with the one in its folder; returns it with notes for the user about changes.
    Raises UserError if a trial that has begun would now have another config, or if the folder cannot be made."""
    folder, notes = sweep.folder, []
    old = read_plan(folder) if (folder / "sweep.json").is_file() else None
    known = {_identity(entry.overrides): entry for entry in old.trials} if old else {}
    entries: list[Entry] = []
    free = max((entry.index for entry in known.values()), default=-1) + 1
    for trial in sweep.trials:
        before = known.pop(_identity(trial.overrides), None)
        index, free = (free, free + 1) if before is None else (before.index, free)
        if old is not None and before is None:
            notes.append(f"trial {index} ({trial.label}) is new")
        elif old is not None and before and before.resolved != trial.resolved and old.outcome(before).starts:
            change = _first_change(before.resolved, trial.resolved)
            raise UserError(
                f"{sweep.path}: trial {index} ({trial.label}) has begun with {change}; trials that differ in more "
                f"than the sweep says cannot be ranked: put it back, or give the sweep another name"
            )
        entries.append(Entry(**vars(trial), index=index, name=f"{sweep.name}-{index:03d}"))
    for entry in known.values():
        if not entry.removed:
            notes.append(f"trial {entry.index} ({entry.label}) is no longer in the file: left as it is, not ranked")
        entries.append(dataclasses.replace(entry, removed=True))
    settings = {item.name: getattr(sweep, item.name) for item in dataclasses.fields(Settings)}
    plan = Plan(**settings, trials=tuple(entries))
    try:
        for path in (folder / "trials", folder / "logs"):
            path.mkdir(parents=True, exist_ok=True)
        write_json_atomically(folder / "sweep.json", {**dataclasses.asdict(plan), "folder": str(folder)})
    except OSError as error:
        raise UserError(f"{sweep.path}: cannot write {folder} ({error.strerror}); change run.dir or name") from error
    return plan, notes


def read_plan(folder: Path) -> Plan:
    """Read the plan in a sweep's folder. Raises UserError if there is none."""
    try:
        tree = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
        rule = tree["hopeless"]
        trials = tuple(Entry(**{**entry, "settings": tuple(entry["settings"])}) for entry in tree["trials"])
        restored = {"folder": folder.absolute(), "launcher": tuple(tree["launcher"]), "trials": trials}
        return Plan(**tree | restored | {"hopeless": Hopeless(**rule) if rule else None})
    except FileNotFoundError:
        raise UserError(f"{folder}: no sweep.json in it; give the folder of a sweep, run.dir/NAME") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / 'sweep.json'}: cannot be read ({error}); start the sweep from its file") from error


def write_json_atomically(path: Path, value: Any) -> None:
    """Write JSON so that readers always see either the old file or the complete new one, even after a crash."""
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False).encode())


def _identity(overrides: Mapping[str, Any]) -> str:
    return json.dumps(overrides, sort_keys=True)


def _first_change(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Text `key = old, now new` for the first key that differs."""
    old, new = dict(leaves(before)), dict(leaves(now))
    key = next((key for key in {**old, **new} if old.get(key) != new.get(key)), "a section")
    return f"{key} = {show(old.get(key))}, now {show(new.get(key))}"
