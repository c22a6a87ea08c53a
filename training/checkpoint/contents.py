"""The contents of a checkpoint: every rank's files, the manifest, and settings that must match on resume."""

import json
import math
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from data.text.holdout import TAIL
from modeling.tensor_parallel import cut
from training.checkpoint.key import Key
from training.checkpoint.manifest import FORMAT, STATE
from training.checkpoint.writer import Files
from training.engine import Engine
from training.engine.rng import generators
from training.engine.tensors import checksums_of, whole_shape_of
from training.progress import Progress

TAG = "deepspeed"
_VERSIONS = {name: version(name) for name in ("torch", "deepspeed", "transformers")}  # looked up once: it opens files


def save_state(files: Files, folder: Path, engine: Engine, state: dict[str, Any]) -> None:
    """Write this rank's state, the run's, parameter shapes and checksums to `files`. A collective."""
    world, checksums = engine.world, checksums_of(engine)
    engine.save(folder, TAG, files)
    files.save(generators(world.device), folder / f"rng-rank-{world.rank}.pt")
    if world.is_main:
        state = {**state, "parameters": parameter_shapes(engine.model), "checksums": checksums}
        if world.tensor is not None or world.experts is not None:
            parameters = engine.model.named_parameters(remove_duplicate=False)
            found = {name: cut(parameter) for name, parameter in parameters}
            state["tensor_slices"] = {name: (how.dimension, how.sizes) for name, how in found.items() if how}
        files.save_text(json.dumps(state, indent=1) + "\n", folder / STATE)


def manifest_of(engine: Engine, progress: Progress, validation_loss: float | None, key: Key | None) -> dict[str, Any]:
    """The manifest without its files and without the run's identity (`training.checkpoint.choice.Lineage`)."""
    regions = dict(engine.regions.dtypes) if engine.regions is not None else None
    finite = validation_loss is None or math.isfinite(validation_loss)
    return {
        "format": FORMAT,
        "step": progress.step,
        "written": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "world_size": engine.world.world_size,
        "zero_stage": engine.stage,
        "precision": {"compute": engine.compute, "regions": regions},
        "data": {"position": progress.position, "tokens": progress.tokens},
        "validation_loss": validation_loss if finite else str(validation_loss),
        "encryption": {"key": key.id} if key is not None else None,
        "versions": _VERSIONS,
    }


_START_ANEW = "start anew with run.resume=never or another run.name"
_PARALLEL = ("parallel.sequence", "parallel.tensor", "parallel.expert")
LAYOUT = ("world size", *_PARALLEL, "ZeRO stage", "precision.compute", "offload")
"""Settings that may change on resume: how masters and sequences are split, and the compute dtype (docs/elastic.md)."""
ATTENTION = "model.attention"
"""A setting that may also change on resume, with a note: implementations round differently. Older files lack it."""
_DEFAULTS = dict.fromkeys(_PARALLEL, 1) | {
    "data.document_masking": False,
    "task": "pretrain",
    "grouping of rows by length": "across epochs",
}
"""Values for checkpoints that were written before the key existed."""
_WEIGHTS = ("the base model", "the teacher")
"""Identities of weights. Earlier versions wrote a hub's as NAME@COMMIT, the commit mostly None: nothing to compare."""
REFERENCE = "the reference of grpo.beta"
"""Identity of its weights; None for beta = 0, which may change, and missing in earlier versions."""
CONFIGS = "config.json of base or teacher"
"""Their identities; None and missing alike."""


def identity_difference(saved: dict[str, Any], current: dict[str, Any]) -> str | None:
    """The first value of `current` that differs in `saved`, as an error message; None when all agree."""
    saved = {**_DEFAULTS, **saved}
    for key, value in current.items():
        said = saved.get(key)
        unknown = "@" in str(said) if key in _WEIGHTS else key in (REFERENCE, CONFIGS) and None in (said, value)
        if key not in (*LAYOUT, ATTENTION) and said != value and not unknown:
            if key == "data fingerprint" and f"{said}{TAIL}" == value:
                fix = f"set data.hold_out=documents, or {_START_ANEW}"
                return f"the end of the text is held out from training in this run and not there; {fix}"
            same = "data.* keys and files, as in the run's config.yaml" if key == "data fingerprint" else key
            return f"{key} is {said} there and {value} in this run; use the same {same}, or {_START_ANEW}"
    return None


def layout_difference(saved: dict[str, Any], current: dict[str, Any]) -> str | None:
    """The difference in layout, such as "world size 2 -> 4"; None if there is none."""
    saved = {**_DEFAULTS, **saved}
    changed = [key for key in LAYOUT if key in current and saved.get(key) != current[key]]
    return ", ".join(f"{key} {saved.get(key)} -> {current[key]}" for key in changed) or None


def attention_difference(saved: dict[str, Any], current: dict[str, Any]) -> str | None:
    """The difference in attention implementation, human-readable; None if there is none or it is not known."""
    before, now = saved.get(ATTENTION), current.get(ATTENTION)
    if before is None or now is None or before == now:
        return None
    return f"{ATTENTION} {before} -> {now}, which rounds differently"


def parameter_shapes(model: torch.nn.Module) -> dict[str, list[int]]:
    """Every parameter's full shape by name, even if ZeRO-3 partitions it or ranks share it."""
    return {name: list(whole_shape_of(parameter)) for name, parameter in model.named_parameters()}


def parameter_difference(saved: dict[str, list[int]], current: dict[str, list[int]]) -> str | None:
    """The first parameter that differs in shape or is in only one of them, as an error message; None when all agree."""
    for name in [*current, *saved]:
        if saved.get(name) != current.get(name):
            shapes = f"{name} has shape {saved.get(name)} there and {current.get(name)} in this run"
            return f"{shapes}; it belongs to another model; {_START_ANEW}"
    return None
