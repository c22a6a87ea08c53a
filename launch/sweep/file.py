"""A sweep file: its trials, how each is started, and when one is stopped early.

Every trial's run config is resolved here, as train.py would, before anything starts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from config import yaml_text
from config.cli import REPOSITORY
from config.deepspeed.choice import first_file
from config.errors import UserError
from config.launcher import as_launched
from config.load import read_file, show, suggest, to_dict
from config.resolved import resolve_run
from launch.sweep.rule import Hopeless

_SWEEP_KEYS = ("run.name", "run.dir")
"""Keys that the sweep sets for each trial."""
_PROCESS_OPTIONS = ("num_gpus", "nproc_per_node", "num_processes")
"""Options of deepspeed, torchrun and accelerate launch for the number of processes."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    overrides: dict[str, Any]
    """Dotted key to value: how it differs from the other trials."""
    settings: tuple[str, ...]
    """All of its `key=value` arguments but those for its folder."""
    resolved: dict[str, Any]
    """Its whole run config without run.name."""

    @property
    def label(self) -> str:
        """How it differs from the other trials, on one line."""
        return " ".join(f"{key}={as_setting(value)}" for key, value in self.overrides.items()) or "as the config says"


@dataclass(frozen=True)
class Settings:
    """What a sweep's file decides for all trials; its plan keeps it."""

    folder: Path
    """run.dir/name, absolute; holds each trial's run folder."""
    name: str
    config: str
    """Path of the run config that every trial starts from."""
    launcher: tuple[str, ...]
    """The words before train.py; empty: plain python, or torchrun for several processes."""
    processes: int
    """[processes] Of each trial."""
    slots: int
    """[trials] At most so many at a time."""
    minutes: float | None
    """[minutes] Of one start of the sweep."""
    price: float | None
    """[money] Of one device for one hour."""
    hopeless: Hopeless | None


@dataclass(frozen=True)
class Sweep(Settings):
    """A sweep file, checked."""

    path: Path
    trials: tuple[Trial, ...]


@dataclass
class _Raw:
    """The keys of a sweep file."""

    config: Any = None
    name: Any = None
    launcher: Any = field(default_factory=list)
    processes: Any = None
    slots: Any = 1
    fixed: Any = field(default_factory=dict)
    grid: Any = field(default_factory=dict)
    trials: Any = field(default_factory=list)
    seeds: Any = 1
    stop: Any = field(default_factory=dict)
    minutes: Any = None
    price_per_device_hour: Any = None


def read_sweep(path: Path) -> Sweep:
    """The sweep in a YAML or JSON file.

    Raises UserError: the file, a key of it, or the run config of one of its trials is wrong; or two trials are the
    same run.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such sweep file; give the path of a YAML or JSON file, see docs/sweep.md")
    tree = read_file(path)
    _check_keys(path, "", tree, [item.name for item in fields(_Raw)])
    raw = _Raw(**tree)
    if not isinstance(raw.config, str):
        raise UserError(f"{path}: config is missing; name the run config that every trial starts from")
    name = path.stem if raw.name is None else raw.name
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UserError(f"{path}: name = {show(name)} cannot be a folder name; use letters, digits, '-', '_' and '.'")
    found = first_file(Path(raw.config).expanduser(), [path.parent, Path(), REPOSITORY])
    if found is None:
        places = f"beside the sweep file, here or in {REPOSITORY}"
        raise UserError(f"{path}: config = '{raw.config}' does not exist, {places}")
    config = found.absolute()
    launcher, processes = _launcher(path, raw)
    trials = _resolved(
        path, config.absolute(), processes, _mapping(path, "fixed", raw.fixed), list(_combinations(path, raw))
    )
    folder = Path(trials[0].resolved["run"]["dir"]).expanduser().absolute()
    return Sweep(
        path=path,
        name=name,
        config=str(config),
        folder=folder / name,
        launcher=launcher,
        processes=processes,
        slots=int(_number(path, "slots", raw.slots, whole=True)),
        hopeless=_hopeless(path, raw.stop),
        minutes=_optional_number(path, "minutes", raw.minutes),
        price=_optional_number(path, "price_per_device_hour", raw.price_per_device_hour),
        trials=tuple(trials),
    )


def _combinations(path: Path, raw: _Raw) -> Iterator[dict[str, Any]]:
    """The overrides of each trial: every entry of `trials` with every point of `grid` and every seed."""
    grid, entries = _mapping(path, "grid", raw.grid), raw.trials
    if not isinstance(entries, list):
        raise UserError(f"{path}: trials = {show(entries)} is not a list; write one `- {{key: value}}` a trial")
    for key, values in grid.items():
        if isinstance(values, dict):
            example = f"{key}.{next(iter(values), 'key')}"
            raise UserError(
                f"{path}: grid: {key} = {show(values)} is a section; write its keys whole: {example}: [...]"
            )
        if not isinstance(values, list) or not values:
            raise UserError(f"{path}: grid: {key} = {show(values)} is not a list of values; write {key}: [a, b]")
    if not grid and not entries and raw.seeds == 1:
        raise UserError(f"{path}: there is nothing to try; give grid:, trials: or seeds:")
    seeds = _seeds(path, raw.seeds)
    for number, entry in enumerate(entries or [{}], start=1):
        chosen = _mapping(path, f"trials: number {number}", entry)
        for values in itertools.product(*grid.values()):
            for seed in seeds:
                parts = (chosen, dict(zip(grid, values, strict=True)), seed)
                keys = [key for part in parts for key in part]
                twice = next((key for key in keys if keys.count(key) > 1 or key in raw.fixed), None)
                if twice is not None:
                    raise UserError(f"{path}: {twice} is set in two of fixed, grid, trials and seeds; keep one")
                reserved = next((key for key in keys if key in _SWEEP_KEYS), None)
                if reserved is not None:
                    raise UserError(f"{path}: {reserved}: the sweep gives each trial its own; leave it out")
                yield {key: value for part in parts for key, value in part.items()}


def _resolved(
    path: Path, config: Path, processes: int, fixed: Mapping[str, Any], combinations: Sequence[Mapping[str, Any]]
) -> list[Trial]:
    if "run.name" in fixed:
        raise UserError(f"{path}: fixed: run.name: the sweep gives each trial its own; leave it out")
    trials: list[Trial] = []
    for overrides in combinations:
        # Fixed keys come first: a trial may change one key of a mapping among them.
        settings = tuple(f"{key}={as_setting(value)}" for key, value in {**fixed, **overrides}.items())
        options = argparse.Namespace(
            config=str(config), overrides=list(settings), deepspeed_config=None, local_rank=None
        )
        try:
            resolved = to_dict(resolve_run(options, as_launched(processes)).config)
        except UserError as error:
            text = str(error)
            if text.startswith("command line: "):
                raise UserError(f"{path}: {text.removeprefix('command line: ')}") from error
            raise UserError(f"{path}: {Trial(dict(overrides), (), {}).label}: {text}") from error
        del resolved["run"]["name"]
        trial = Trial(dict(overrides), tuple(item for item in settings if not item.startswith("run.dir=")), resolved)
        same = next((other for other in trials if other.resolved == resolved), None)
        if same is not None:
            raise UserError(f"{path}: two trials are the same run, {same.label} and {trial.label}; remove one")
        trials.append(trial)
    return trials


def as_setting(value: Any) -> str:
    """A value in the form of `key=value`: text that reads back unchanged, else JSON, which is YAML."""
    if isinstance(value, str) and value == value.strip():
        with suppress(ValueError):
            if yaml_text.parse(value) == value:
                return value
    return json.dumps(value, ensure_ascii=False)


def _launcher(path: Path, raw: _Raw) -> tuple[tuple[str, ...], int]:
    words = raw.launcher.split() if isinstance(raw.launcher, str) else raw.launcher
    if not isinstance(words, list):
        raise UserError(f"{path}: launcher = {show(words)} is not a list of words; write [deepspeed, --num_gpus, 2]")
    launcher = tuple(str(word) for word in words)
    if "launch.supervise" in launcher:
        raise UserError(f"{path}: launcher: launch.supervise would restart what the sweep stops; name the launcher")
    count = None
    for word, following in itertools.zip_longest(launcher, launcher[1:], fillvalue=""):
        option, equals, value = word.lstrip("-").replace("-", "_").partition("=")
        if word.startswith("--") and option in _PROCESS_OPTIONS and (value if equals else following).isdecimal():
            count = int(value if equals else following)
    if count is None and launcher and Path(launcher[0]).name.startswith("python"):
        count = 1
    if raw.processes is None:
        if launcher and count is None:
            line = " ".join(launcher)
            raise UserError(f"{path}: launcher = '{line}' does not say how many processes it starts; add processes: N")
        return launcher, count or 1
    processes = int(_number(path, "processes", raw.processes, whole=True))
    if count not in (None, processes):
        raise UserError(f"{path}: processes = {processes}, but the launcher says {count}; leave processes out")
    return launcher, processes


def _seeds(path: Path, given: Any) -> list[dict[str, Any]]:
    if isinstance(given, list):
        return [{"run.seed": seed} for seed in given] or [{}]
    count = int(_number(path, "seeds", given, whole=True))
    return [{"run.seed": seed} for seed in range(count)] if count > 1 else [{}]


def _hopeless(path: Path, stop: Any) -> Hopeless | None:
    given = _mapping(path, "stop", stop)
    _check_keys(path, "stop.", given, ["hopeless"])
    if not given:
        return None
    rule = _mapping(path, "stop.hopeless", given["hopeless"])
    _check_keys(path, "stop.hopeless.", rule, [item.name for item in fields(Hopeless)])
    for key in ("after_steps", "every_steps", "trials"):
        if key in rule:
            _number(path, f"stop.hopeless.{key}", rule[key], whole=True)
    if "factor" in rule and _number(path, "stop.hopeless.factor", rule["factor"]) < 1:
        raise UserError(f"{path}: stop.hopeless.factor = {show(rule['factor'])} must be at least 1")
    if rule.get("loss", "training") not in ("training", "validation"):
        raise UserError(f"{path}: stop.hopeless.loss = {show(rule['loss'])} is not one of training, validation")
    return Hopeless(**rule)


def _mapping(path: Path, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise UserError(f"{path}: {key} = {show(value)} is not a mapping of keys to values")
    return value


def _check_keys(path: Path, prefix: str, tree: Mapping[str, Any], known: Sequence[str]) -> None:
    names = [prefix + name for name in known]
    for key in tree:
        if prefix + str(key) not in names:
            raise UserError(f"{path}: {prefix}{key}: no such key of a sweep{suggest(prefix + str(key), names)}")


def _number(path: Path, key: str, value: Any, *, whole: bool = False) -> float:
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
        raise UserError(f"{path}: {key} = {show(value)} is not a {'whole ' if whole else ''}number above 0")
    return float(value)


def _optional_number(path: Path, key: str, value: Any) -> float | None:
    return None if value is None else _number(path, key, value)
