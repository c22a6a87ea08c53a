"""One fully resolved run, from the config, the DeepSpeed JSON and the launcher's environment."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.batch import BatchPlan, plan_batch
from config.cli import REPOSITORY
from config.deepspeed.choice import find_deepspeed_json, first_file
from config.deepspeed.document import offload, read_document, zero_stage
from config.deepspeed.resolve import Dtype, compute_dtype, resolve_json
from config.errors import UserError
from config.json_text import read_object
from config.launcher import check_agreement, launch_command, read_rank_env
from config.load import load_config
from config.machine.processes import launchers
from config.schema import CheckpointSection, Config, DeepSpeedSection
from config.secrets import parse_key_setting, refuse_secrets
from config.task import settle_task


@dataclass(frozen=True)
class Resolved:
    """One fully resolved run: no value is `auto` any more."""

    config: Config
    config_path: Path
    deepspeed: dict[str, Any]
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
    """Command that starts this run again."""

    resume_command: str
    """Command that resumes it from its newest checkpoint."""

    @property
    def tokens_per_step(self) -> int:
        """[tokens] Size of one global batch."""
        return self.batch.global_size * self.config.data.sequence_length


def resolve_run(options: argparse.Namespace, environment: Mapping[str, str], *, started: bool = False) -> Resolved:
    """Load, merge and check everything. started: as in `load_config`. Raises UserError for the first mistake found."""
    env = read_rank_env(environment, options.local_rank)
    path = Path(options.config)
    # Accelerate's file wins over the run config, and the command line over both.
    accelerate_file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") or None
    overrides = [] if accelerate_file is None else [f"deepspeed.config={json.dumps(accelerate_file)}"]
    overrides += options.overrides
    config = load_config(path, overrides, options.deepspeed_config, started=started)
    _check_store(config.checkpoint, _where(path, options.overrides, "checkpoint"))
    if options.deepspeed_config is not None or config.deepspeed.config != accelerate_file:
        accelerate_file = None
    given = accelerate_file or options.deepspeed_config
    origin = "accelerate's deepspeed_config_file" if accelerate_file else str(path)
    json_path = find_deepspeed_json(config.deepspeed.config, path, first=given is not None, origin=origin)
    document = read_document(json_path)
    where = _where(path, options.overrides, "batch", "parallel")
    batch = plan_batch(config.batch, config.parallel, env.world_size, where=where)
    resolved_json = resolve_json(config, json_path, document, world_size=env.world_size)
    for index, fault in enumerate(config.faults):
        if fault.rank >= env.world_size:
            problem = f"is not one of the {env.world_size} processes; ranks count from 0"
            place = _where(path, options.overrides, "faults")
            raise UserError(f"{place}: faults[{index}].rank = {fault.rank} {problem}")
    compute = compute_dtype(config, json_path, document)
    if config.precision.path == "manifest" and compute != "fp32":
        raise UserError(
            f"{json_path}: enables {compute}, but precision.path = manifest keeps parameters in FP32; remove "
            f"deepspeed.config, or set it to ds_configs/zero{zero_stage(document)}_fp32.json"
        )
    precision = "manifest" if config.precision.path == "manifest" else compute
    check_agreement(environment, f"{path} with {json_path}", resolved_json, precision)
    arguments = ["--config", options.config, *([] if given is None else ["--deepspeed_config", given])]
    words = _last_of_each_key(options.overrides)
    resumed = words if config.run.resume == "auto" else _last_of_each_key([*words, "run.resume=auto"])
    command, resume_command = (
        launch_command(env, environment, [*arguments, *overridden], script=sys.argv[0], above=launchers())
        for overridden in (words, resumed)
    )
    return Resolved(
        config=_with_resolved_values(config, compute, path, json_path),
        config_path=path,
        deepspeed=resolved_json,
        deepspeed_path=json_path,
        compute=compute,
        zero_stage=zero_stage(resolved_json),
        offload=offload(resolved_json),
        batch=batch,
        rank=env.rank,
        world_size=env.world_size,
        local_rank=env.local_rank,
        overrides=tuple(options.overrides),
        command=command,
        resume_command=resume_command,
    )


def _last_of_each_key(overrides: Sequence[str]) -> list[str]:
    """The overrides without those replaced by a later one of the same key. A mapping is merged and replaces none."""
    kept: list[str] = []
    for text in overrides:
        key, _, value = text.partition("=")
        if not value.lstrip().startswith("{"):
            kept = [earlier for earlier in kept if earlier.partition("=")[0] != key]
        kept.append(text)
    return kept


def _check_store(section: CheckpointSection, where: str) -> None:
    """Refuse secrets before any part of the config is printed or saved."""
    refuse_secrets(section.dir or "", section.storage_options)
    if section.encryption_key is not None:
        parse_key_setting(section.encryption_key)
    if section.dir is not None and "://" not in section.dir:
        raise UserError(f"{where}: checkpoint.dir = {section.dir}: is not a URL; set a folder with run.dir")
    if section.storage_options and section.dir is None:
        raise UserError(f"{where}: checkpoint.storage_options have no effect without checkpoint.dir; set it to a URL")
    if section.accept_plain and section.encryption_key is None:
        raise UserError(f"{where}: checkpoint.accept_plain has no effect without checkpoint.encryption_key; set both")


def _with_resolved_values(config: Config, compute: Dtype, path: Path, json_path: Path) -> Config:
    """`config` with its open values filled in, so that the run folder's config.yaml reproduces the run."""
    config = settle_task(config)
    manifest, scaling = config.precision.manifest, config.precision.loss_scale
    if manifest is not None:
        found = first_file(Path(manifest).expanduser(), [path.parent, Path(), REPOSITORY])
        if found is None:
            raise UserError(f"{path}: precision.manifest = '{manifest}' does not exist; see config/manifests/")
        manifest, scale = _portable(found), read_object(found, "precision manifest").get("loss_scale")
        if scaling.initial is None and isinstance(scale, int) and scale > 0:  # precision/manifest.py refuses the rest
            scaling = dataclasses.replace(scaling, initial=min(float(scale), scaling.largest_scale))
    precision = dataclasses.replace(config.precision, compute=compute, manifest=manifest, loss_scale=scaling.resolved())
    # the JSON also determines stage and offload
    return dataclasses.replace(config, precision=precision, deepspeed=DeepSpeedSection(config=_portable(json_path)))


def _portable(path: Path) -> str:
    """The path relative to Mantissa's folder if the file lies in it, else absolute."""
    absolute = path.resolve()
    return (absolute.relative_to(REPOSITORY) if absolute.is_relative_to(REPOSITORY) else absolute).as_posix()


def _where(path: Path, overrides: Sequence[str], *sections: str) -> str:
    """The run config's path, with the overrides in the given sections."""
    given = [text for text in overrides if text.partition("=")[0].partition(".")[0] in sections]
    return f"{path} with {' '.join(given)}" if given else str(path)
