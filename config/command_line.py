"""`train.py`'s command line: options, `key.sub=value` overrides, the resolved run, and `--show-config` and `--help`.

Everything that a user can get wrong is found here, before a process group, a model or a file exists.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import accelerate, help_text
from config.batch import BatchPlan, plan_batch
from config.cli import Arguments
from config.deepspeed import document as deepspeed_document
from config.deepspeed import resolve as deepspeed_json
from config.deepspeed.resolve import Dtype
from config.errors import UserError
from config.launcher import Place, launch_command, read_place
from config.load import load_config, to_yaml
from config.schema import CheckpointSection, Config
from config.secrets import place_of_key, refuse_secrets

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLE = "deepspeed --num_gpus 2 train.py --config config/recipes/demo.yaml"
CONFIG_ERROR = 2


@dataclass(frozen=True)
class Resolved:
    """One run, completely decided: nothing is `auto` any more."""

    config: Config
    config_path: Path
    deepspeed: dict[str, Any]
    """The resolved DeepSpeed JSON."""
    deepspeed_path: Path
    compute: Dtype
    """Equals config.precision.compute."""
    zero_stage: int
    offload: str
    """none, optimizer, param or optimizer+param."""
    batch: BatchPlan
    rank: int
    world_size: int
    local_rank: int
    overrides: tuple[str, ...]
    """The `key.sub=value` arguments, as given."""
    command: str
    """Starts this run again."""

    @property
    def resume_command(self) -> str:
        """Goes on with this run from its newest checkpoint."""
        return self.command if self.config.run.resume == "auto" else f"{self.command} run.resume=auto"


def read_command_line(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Resolved:
    """The run that `argv` (without the program's name) and the launcher's environment describe.

    Raises:
        SystemExit: 2 after one line on stderr (rank 0 only) when the user must fix something;
            0 after `--help` and `--show-config`.
    """
    rank = environment.get("RANK", "0")
    speaks = not rank.isdecimal() or int(rank) == 0
    try:
        if "--help" in argv or "-h" in argv:
            if speaks:
                sys.stdout.write(help_text.render())
            raise SystemExit(0)
        options = _parse(argv)
        resolved = resolve_run(options, environment)
    except UserError as error:
        if speaks:
            sys.stderr.write(f"error: {error}\n")
        raise SystemExit(CONFIG_ERROR) from None
    if options.show_config:
        if speaks:
            sys.stdout.write(render_config(resolved))
        raise SystemExit(0)
    return resolved


def resolve_run(options: argparse.Namespace, environment: Mapping[str, str]) -> Resolved:
    """Load, merge and check everything.

    Raises:
        UserError: the first thing that is wrong.
    """
    place = read_place(environment, options.local_rank)
    path = Path(options.config)
    told = accelerate.deepspeed_config_file(environment)
    # Accelerate's file wins over the run config, and what is typed wins over both.
    overrides = [*([] if told is None else [f"deepspeed.config={json.dumps(told)}"]), *options.overrides]
    config = load_config(path, overrides, options.deepspeed_config)
    _check_store(config.checkpoint, _where(path, options.overrides, "checkpoint"))
    told = told if options.deepspeed_config is None and config.deepspeed.config == told else None
    given = told or options.deepspeed_config
    origin = "accelerate's deepspeed_config_file" if told else str(path)
    json_path = find_deepspeed_json(config.deepspeed.config, path, first=given is not None, origin=origin)
    document = deepspeed_document.read_document(json_path)
    where = _where(path, options.overrides, "batch")
    batch = plan_batch(config.batch.global_size, config.batch.micro_size, place.world_size, where=where)
    resolved_json = deepspeed_json.resolve(config, json_path, document, world_size=place.world_size)
    _check_fault_ranks(config, _where(path, options.overrides, "faults"), place.world_size)
    compute = deepspeed_json.compute_dtype(config, json_path, document)
    if config.precision.path == "manifest" and compute != "fp32":
        raise UserError(
            f"{json_path}: enables {compute}, but precision.path = manifest keeps parameters in FP32; use "
            f"ds_configs/zero{deepspeed_document.zero_stage(document)}_fp32.json"
        )
    precision = "manifest" if config.precision.path == "manifest" else compute
    accelerate.check_agreement(environment, f"{path} with {json_path}", resolved_json, precision)
    return Resolved(
        config=_with_decisions(config, compute, path, json_path),
        config_path=path,
        deepspeed=resolved_json,
        deepspeed_path=json_path,
        compute=compute,
        zero_stage=deepspeed_document.zero_stage(resolved_json),
        offload=deepspeed_document.offload(resolved_json),
        batch=batch,
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        overrides=tuple(options.overrides),
        command=_command(options, given, place, environment),
    )


def _check_store(section: CheckpointSection, where: str) -> None:
    """Before anything of the config is shown or written down."""
    refuse_secrets(section.dir or "", section.storage_options)
    if section.encryption_key is not None:
        place_of_key(section.encryption_key)
    if section.dir is not None and "://" not in section.dir:
        raise UserError(f"{where}: checkpoint.dir = {section.dir}: is no URL; a folder is set with run.dir")
    if section.storage_options and section.dir is None:
        raise UserError(f"{where}: checkpoint.storage_options are of no use without checkpoint.dir; name a URL there")
    if section.accept_plain and section.encryption_key is None:
        raise UserError(f"{where}: checkpoint.accept_plain is of no use without checkpoint.encryption_key; set both")


def find_deepspeed_json(name: str, config_path: Path, *, first: bool = False, origin: str | None = None) -> Path:
    """The DeepSpeed JSON `name`: beside the run config, then in the working folder, then in Mantissa's own folder.

    Args:
        name: path as given; an absolute one or one with ~ is taken as it is.
        first: look in the working folder first, as for any path typed on a command line.
        origin: where it was named, for the error; the run config unless given.

    Raises:
        UserError: it is in none of them.
    """
    given = Path(name).expanduser()
    folders = [config_path.parent, Path(), REPOSITORY]
    if first:
        folders[:2] = reversed(folders[:2])
    found = _find(given, folders)
    if found is not None:
        return found
    there = sorted(item.name for item in (REPOSITORY / "ds_configs").glob("*.json"))
    near = difflib.get_close_matches(given.name, there, n=1)
    hint = f"did you mean ds_configs/{near[0]}?" if near else f"ds_configs/ has {', '.join(there)}"
    raise UserError(f"{origin or config_path}: deepspeed.config = '{name}' does not exist; {hint}")


def render_config(resolved: Resolved) -> str:
    """The resolved run config and DeepSpeed JSON as two YAML documents (JSON is YAML)."""
    plan = resolved.batch
    return (
        f"# Run config, resolved from {resolved.config_path}\n"
        f"# {plan.global_size} sequences a step = micro-batches of {plan.micro_size} x {plan.accumulation} accumulated"
        f" x {plan.world_size} processes\n"
        f"{to_yaml(resolved.config)}"
        f"---\n# DeepSpeed JSON, resolved from {resolved.deepspeed_path}\n"
        f"{json.dumps(resolved.deepspeed, indent=2)}\n"
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Arguments(prog="train.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--deepspeed_config", "--deepspeed-config")
    parser.add_argument("--local_rank", "--local-rank", type=int)
    parser.add_argument("--show-config", "--show_config", action="store_true")
    # The deepspeed launcher needs no such flag; scripts written for other trainers pass it.
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options, unknown = parser.parse_known_intermixed_args(list(argv))
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        name = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "set run config keys as key.sub=value; see train.py --help"
        raise UserError(f"command line: no such option {name}; {hint}")
    if options.config is None:
        raise UserError(f"command line: --config FILE is missing; for example: {EXAMPLE}")
    return options


def _with_decisions(config: Config, compute: Dtype, path: Path, json_path: Path) -> Config:
    """`config` with what was open decided, so that the run folder's config.yaml starts the same run again."""
    manifest = config.precision.manifest
    if manifest is not None:
        found = _find(Path(manifest).expanduser(), [path.parent, Path(), REPOSITORY])
        if found is None:
            raise UserError(f"{path}: precision.manifest = '{manifest}' does not exist; see config/manifests/")
        manifest = _portable(found)
    return dataclasses.replace(
        config,
        precision=dataclasses.replace(
            config.precision, compute=compute, manifest=manifest, loss_scale=config.precision.loss_scale.decided()
        ),
        deepspeed=dataclasses.replace(config.deepspeed, config=_portable(json_path)),
    )


def _find(given: Path, folders: Sequence[Path]) -> Path | None:
    """The first of `folders` / given that is a file; an absolute path stays as it is."""
    return next((folder / given for folder in folders if (folder / given).is_file()), None)


def _portable(path: Path) -> str:
    """Relative to Mantissa's folder where the file lies in it, else absolute."""
    absolute = path.resolve()
    return (absolute.relative_to(REPOSITORY) if absolute.is_relative_to(REPOSITORY) else absolute).as_posix()


def _where(path: Path, overrides: Sequence[str], section: str) -> str:
    """The run config's name, and the overrides of one section with it."""
    mine = [text for text in overrides if text.partition("=")[0].partition(".")[0] == section]
    return f"{path} with {' '.join(mine)}" if mine else str(path)


def _check_fault_ranks(config: Config, where: str, world_size: int) -> None:
    for index, fault in enumerate(config.faults):
        if fault.rank >= world_size:
            problem = f"is not one of the {world_size} processes; ranks count from 0"
            raise UserError(f"{where}: faults[{index}].rank = {fault.rank} {problem}")


def _command(
    options: argparse.Namespace, deepspeed_config: str | None, place: Place, environment: Mapping[str, str]
) -> str:
    arguments = ["--config", options.config]
    if deepspeed_config is not None:
        arguments += ["--deepspeed_config", deepspeed_config]
    return launch_command(place, environment, [*arguments, *options.overrides])
