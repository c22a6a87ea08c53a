"""The run folder: the files of one run, and its creation without losing an earlier run.

runs/<name>/config.yaml        the resolved run config          config.1.yaml, ...: earlier sessions
           ds_config.json      the resolved DeepSpeed JSON, no "auto" left
           environment.json    versions, hardware and git commit of the newest session
           events.jsonl        the source of truth; the plots, the report and wandb are made from it
           checkpoints/       step-<n>/ and LATEST
           plots/  report.md  sample.txt, sampled from the trained model
           wandb/             wandb's own folder
           .run_lock           the job that is writing it: tracking/run_lock.py
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self

from config import yaml_text
from config.errors import UserError
from config.files import write_atomically
from config.redact import redact


class _Inside:
    """Descriptor for a path inside the run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run_dir: "RunDir", owner: type["RunDir"]) -> Path:
        return run_dir.path / self._name


@dataclass(frozen=True)
class RunDir:
    """Paths of the files in one run folder. The constructor touches no files; `create` makes the folder."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the run, which is that of its folder."""
        return self.path.resolve().name

    config = _Inside("config.yaml")
    deepspeed_config = _Inside("ds_config.json")
    environment = _Inside("environment.json")
    events = _Inside("events.jsonl")
    checkpoints = _Inside("checkpoints")
    plots = _Inside("plots")
    report = _Inside("report.md")
    sample = _Inside("sample.txt")
    wandb = _Inside("wandb")

    @classmethod
    def create(cls, root: Path, name: str, *, fresh: bool) -> Self:
        """Make `root/name` (and `root`, if its parent exists). Call on rank 0 only.

        fresh: rename an existing folder of that name to name.1, name.2, ... (the next free one); nothing is deleted.
        Otherwise an existing folder is reused. Raises UserError if the folder cannot be made or written.
        """
        if name in ("", ".", "..") or Path(name).name != name:
            raise UserError(f"run.name = {name!r} cannot be a folder name; use letters, digits, '-', '_' and '.'")
        path = root / name
        try:
            for folder, key in ((root, "run.dir"), (path, "run.name")):
                if folder.exists() and not folder.is_dir():
                    raise UserError(f"{key}: {folder} is a file where a folder is needed; move it or change {key}")
            if not root.exists() and not root.resolve().parent.is_dir():
                raise UserError(f"run.dir = {root}: {root.resolve().parent} does not exist; make it or change run.dir")
            root.mkdir(exist_ok=True)
            if fresh and path.exists():
                path.rename(_next_free(root / f"{name}.{n}" for n in count(1)))
            for folder in (path, path / "checkpoints", path / "plots"):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"run.dir: cannot make {path} ({error.strerror}); choose a folder you may write") from error
        for folder in (path, path / "checkpoints", path / "plots"):
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                reason = "cannot be read and written; change its permissions or choose another run.dir"
                raise UserError(f"run.dir: {folder} {reason}")
        return cls(path)

    def write_inputs(self, config: dict[str, Any], deepspeed: dict[str, Any], environment: dict[str, Any]) -> None:
        """Write the inputs of the run, each file atomically and without secrets.

        If a file exists with other content, as in a resumed run, the old one is kept as config.1.yaml and so on, the
        highest number being the most recent. Raises UserError if they cannot be written.
        """
        try:
            _publish(self.config, yaml_text.dump(redact(config)))
            _publish(self.deepspeed_config, json.dumps(redact(deepspeed), indent=2) + "\n")
            _publish(self.environment, json.dumps(redact(environment), indent=2) + "\n")
        except OSError as error:
            reason = f"cannot be written ({error.strerror or error})"
            raise UserError(f"run.dir: {self.path} {reason}; free space there, or choose another run.dir") from error


def setting(config: Mapping[str, Any], dotted: str) -> Any:
    """Value of a dotted key in the resolved config; None if missing."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _publish(path: Path, text: str) -> None:
    content = text.encode()
    if path.exists():
        old = path.read_bytes()
        if old == content:
            return
        numbered = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in count(1))
        write_atomically(_next_free(numbered), old)
    write_atomically(path, content)


def _next_free(candidates: Iterator[Path]) -> Path:
    return next(path for path in candidates if not path.exists())
