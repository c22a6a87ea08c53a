"""Read a sweep file: its trials, how each is started, and when one is stopped early.

The run config of every trial is resolved here, as train.py would do, before anything starts.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config import yaml_text
from config.cli import REPOSITORY
from config.command_line import parse
from config.deepspeed.choice import first_file
from config.errors import UserError
from config.launcher import as_launched
from config.load import build_section, read_file, show, to_dict
from config.resolved import resolve_run
from config.schema import limit
from launch.job import own_processes
from launch.sweep.rule import Hopeless

_SWEEP_KEYS = ("run.name", "run.dir")
"""Keys that the sweep sets for each trial."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    label: str
    """Its overrides on one line."""
    overrides: dict[str, Any]
    """Dotted key to value, for the keys that the sweep varies."""
    settings: tuple[str, ...]
    """Its `key=value` arguments, without those for its folder."""
    resolved: dict[str, Any]
    """Its complete run config, without run.name."""


@dataclass(frozen=True)
class Settings:
    """Settings of a sweep file that apply to all trials; the plan keeps them."""

    folder: Path
    """Absolute path run.dir/name, which holds the run folder of each trial."""
    name: str
    config: str
    """Path of the run config that every trial starts from."""
    launcher: tuple[str, ...]
    """Words before train.py; empty: plain python, or torchrun for several processes."""
    processes: int
    """[processes] Number per trial."""
    slots: int
    """[trials] Maximum number that run at a time."""
    minutes: float | None
    """[minutes] Time limit of one start of the sweep."""
    price: float | None
    """[money] Price of one device for one hour."""
    hopeless: Hopeless | None


@dataclass(frozen=True)
class Sweep(Settings):
    path: Path
    trials: tuple[Trial, ...]


@dataclass(frozen=True)
class _Stop:
    """Section `stop:` of a sweep file."""

    hopeless: Hopeless | None = None


@dataclass(frozen=True)
class _File:
    """The keys of a sweep file."""

    config: str
    name: str | None = None
    launcher: Any = ()
    processes: int | None = limit(None, at_least=1)
    slots: int = limit(1, at_least=1)
    fixed: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, Any] = field(default_factory=dict)
    trials: tuple[dict[str, Any], ...] = ()
    seeds: Any = 1
    stop: _Stop = field(default_factory=_Stop)
    minutes: float | None = limit(None, above=0.0)
    price_per_device_hour: float | None = limit(None, above=0.0)


def read_sweep(path: Path) -> Sweep:
    """Read a sweep from a YAML or JSON file and check the config of each trial. Raises UserError."""
    if not path.is_file():
        raise UserError(f"{path}: no such sweep file; give the path of a YAML or JSON file, see docs/sweep.md")
    file = build_section(_File, read_file(path), path)
    name = path.stem if file.name is None else file.name
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UserError(f"{path}: name = {show(name)} cannot be a folder name; use letters, digits, '-', '_' and '.'")
    found = first_file(Path(file.config).expanduser(), [path.parent, Path(), REPOSITORY])
    if found is None:
        places = f"beside the sweep file, here or in {REPOSITORY}"
        raise UserError(f"{path}: config = '{file.config}' does not exist, {places}")
    config = found.absolute()
    launcher, processes = _launcher(path, file)
    trials = _resolved(path, config, processes, file.fixed, list(_combinations(path, file)))
    folder = Path(trials[0].resolved["run"]["dir"]).expanduser().absolute()
    return Sweep(
        path=path,
        name=name,
        config=str(config),
        folder=folder / name,
        launcher=launcher,
        processes=processes,
        slots=file.slots,
        hopeless=file.stop.hopeless,
        minutes=file.minutes,
        price=file.price_per_device_hour,
        trials=tuple(trials),
    )


def _combinations(path: Path, file: _File) -> Iterator[dict[str, Any]]:
    """Overrides of each trial: every entry of `trials` combined with every point of `grid` and every seed."""
    grid = file.grid
    for key, values in grid.items():
        if isinstance(values, dict):
            example = f"{key}.{next(iter(values), 'key')}"
            raise UserError(
                f"{path}: grid: {key} = {show(values)} is a section; write its keys whole: {example}: [...]"
            )
        if not isinstance(values, list) or not values:
            raise UserError(f"{path}: grid: {key} = {show(values)} is not a list of values; write {key}: [a, b]")
    if not grid and not file.trials and file.seeds == 1:
        raise UserError(f"{path}: there is nothing to try; give grid:, trials: or seeds:")
    seeds = _seeds(path, file.seeds)
    for chosen in file.trials or ({},):
        for values in itertools.product(*grid.values()):
            for seed in seeds:
                parts = (chosen, dict(zip(grid, values, strict=True)), seed)
                keys = [key for part in parts for key in part]
                twice = next((key for key in keys if keys.count(key) > 1 or key in file.fixed), None)
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
        label = label_of(overrides)
        # Fixed keys come first, so that a trial may change one key of a mapping among them.
        settings = tuple(f"{key}={as_setting(value)}" for key, value in {**fixed, **overrides}.items())
        try:
            options = parse(["--config", str(config), *settings])
            resolved = to_dict(resolve_run(options, as_launched(processes)).config)
        except UserError as error:
            text = str(error)
            text = text.removeprefix("command line: ") if text.startswith("command line: ") else f"{label}: {text}"
            raise UserError(f"{path}: {text}") from error
        del resolved["run"]["name"]
        same = next((other for other in trials if other.resolved == resolved), None)
        if same is not None:
            raise UserError(f"{path}: two trials are the same run, {same.label} and {label}; remove one")
        settings = tuple(item for item in settings if not item.startswith("run.dir="))
        trials.append(Trial(label, dict(overrides), settings, resolved))
    return trials


def label_of(overrides: Mapping[str, Any]) -> str:
    """Overrides on one line."""
    return " ".join(f"{key}={as_setting(value)}" for key, value in overrides.items()) or "as the config says"


def as_setting(value: Any) -> str:
    """A value as written in `key=value`: plain text if it reads back unchanged, else JSON, which is valid YAML."""
    if isinstance(value, str) and value == value.strip():
        with suppress(ValueError):
            if yaml_text.parse(value) == value:
                return value
    return json.dumps(value, ensure_ascii=False)


def _launcher(path: Path, file: _File) -> tuple[tuple[str, ...], int]:
    words = file.launcher.split() if isinstance(file.launcher, str) else file.launcher
    if not isinstance(words, list | tuple):
        raise UserError(f"{path}: launcher = {show(words)} is not a list of words; write [deepspeed, --num_gpus, 2]")
    launcher = tuple(str(word) for word in words)
    if "launch.supervise" in launcher:
        raise UserError(f"{path}: launcher: launch.supervise would restart what the sweep stops; name the launcher")
    count = own_processes(launcher)
    if count is None and launcher and Path(launcher[0]).name.startswith("python"):
        count = 1
    if file.processes is None:
        if launcher and count is None:
            line = " ".join(launcher)
            raise UserError(f"{path}: launcher = '{line}' does not say how many processes it starts; add processes: N")
        return launcher, count or 1
    if count not in (None, file.processes):
        raise UserError(f"{path}: processes = {file.processes}, but the launcher says {count}; leave processes out")
    return launcher, file.processes


def _seeds(path: Path, given: Any) -> list[dict[str, Any]]:
    if isinstance(given, list):
        return [{"run.seed": seed} for seed in given] or [{}]
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise UserError(f"{path}: seeds = {show(given)} is neither a whole number above 0 nor a list of seeds")
    return [{"run.seed": seed} for seed in range(given)] if given > 1 else [{}]
