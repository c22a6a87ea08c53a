"""The choice of a run's DeepSpeed JSON by one key: precision.compute, precision.manifest, deepspeed.stage or
deepspeed.offload.

Later keys win, the command line over the file; keys in the same place must agree, and a JSON of the user's own is never
replaced: config/deepspeed/resolve.py refuses a mismatch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum
from pathlib import Path

from config.cli import REPOSITORY
from config.errors import UserError
from config.schema import Config

FOLDER = "ds_configs"
_NAME = re.compile(r"zero([0-3])_(fp32|bf16|fp16)(_offload)?\.json")
_STAGE, _COMPUTE = 2, "bf16"


class Place(IntEnum):
    """The place where a key was written; a later place wins."""

    NOWHERE, FILE, COMMAND_LINE = range(3)


def settle(config: Config, path: Path, place: Callable[[str], Place]) -> Config:
    """`config` with precision.path and deepspeed.config set from the keys that imply them. path: the run config."""
    precision = config.precision
    if place("precision.manifest") > place("precision.path"):
        precision = replace(precision, path="cast" if precision.manifest is None else "manifest")
        if precision.path == "manifest" and place("precision.manifest") > place("precision.compute"):
            precision = replace(precision, compute="auto")
    return _with_json(replace(config, precision=precision), path, place)


def _with_json(config: Config, path: Path, place: Callable[[str], Place]) -> Config:
    section, precision = config.deepspeed, config.precision
    compute = None if precision.compute == "auto" else precision.compute
    decides = place("precision.compute")
    if precision.path == "manifest":
        compute, decides = "fp32", max(place("precision.manifest"), place("precision.path"))
    if section.config is None:
        return replace(config, deepspeed=replace(section, config=json_name(section.stage, compute, section.offload)))
    chosen = place("deepspeed.config")
    stage = section.stage if place("deepspeed.stage") >= chosen else None
    offload = section.offload if place("deepspeed.offload") >= chosen else None
    name, own = section.config, _own_json(section.config, path)
    if own is not None:
        asked = (
            compute if compute is not None and decides > chosen else own[0],
            stage if stage is not None and place("deepspeed.stage") > chosen else own[1],
            offload if offload is not None and place("deepspeed.offload") > chosen else own[2],
        )
        name = name if asked == own else json_name(asked[1], asked[0], asked[2])
    return replace(config, deepspeed=replace(section, config=name, stage=stage, offload=offload))


def _own_json(name: str, path: Path) -> tuple[str, int, str] | None:
    """Dtype, stage and offload of a JSON in Mantissa's own ds_configs/; None for any other, or for none."""
    found = first_file(Path(name).expanduser(), [path.parent, Path(), REPOSITORY])
    if found is None or found.resolve().parent != (REPOSITORY / FOLDER).resolve():
        return None
    match = _NAME.fullmatch(found.name)
    return match and (match[2], int(match[1]), "cpu" if match[3] else "none")


def json_name(stage: int | None, compute: str | None, offload: str | None) -> str:
    """Name of the JSON in ds_configs/ for these; None is the default. Raises UserError if there is none."""
    stage = _STAGE if stage is None else stage
    if stage == 0 and offload == "cpu":
        raise UserError("deepspeed.offload = cpu needs deepspeed.stage 1 or more, not 0; remove it, or raise the stage")
    return f"{FOLDER}/zero{stage}_{compute or _COMPUTE}{'_offload' if offload == 'cpu' else ''}.json"


def find_deepspeed_json(name: str | None, config_path: Path, *, first: bool = False, origin: str | None = None) -> Path:
    """The DeepSpeed JSON `name`: beside the run config, then in the working folder, then in Mantissa's own folder.

    first: look in the working folder first, as for any path on a command line. origin: where it was named, for the
    error. Raises UserError.
    """
    assert name is not None, "load_config chooses one"
    given = Path(name).expanduser()
    folders = [config_path.parent, Path(), REPOSITORY]
    if first:
        folders[:2] = reversed(folders[:2])
    found = first_file(given, folders)
    if found is not None:
        return found
    there = sorted(item.name for item in (REPOSITORY / FOLDER).glob("*.json"))
    near = difflib.get_close_matches(given.name, there, n=1)
    hint = f"did you mean {FOLDER}/{near[0]}?" if near else f"{FOLDER}/ has {', '.join(there)}"
    raise UserError(f"{origin or config_path}: deepspeed.config = '{name}' does not exist; {hint}")


def first_file(given: Path, folders: Sequence[Path]) -> Path | None:
    """The first of `folders` / given that is a file; an absolute path is its own only candidate."""
    return next((folder / given for folder in folders if (folder / given).is_file()), None)
