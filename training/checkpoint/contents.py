"""What goes into a checkpoint: every rank's files, what the manifest says of them, and of which run it is.

A checkpoint's identity is what two runs must share for one to resume from the other's.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.checkpoint.manifest import FORMAT, STATE
from training.engine.rng import generators
from training.engine.tensors import checksums_of, shape_of
from training.progress import Progress

if TYPE_CHECKING:
    import torch

    from training.checkpoint.key import Key
    from training.checkpoint.writer import Files
    from training.engine import Engine

TAG = "deepspeed"


def take(files: Files, folder: Path, engine: Engine, state: dict[str, Any]) -> None:
    """Give `files` all of this rank's: copies that wait to be written, or, where nothing is copied, on disk already.

    state: of the run, and its identity; what the engine alone knows is added.
    """
    world, checksums = engine.world, checksums_of(engine)
    engine.save(folder, TAG, files)
    files.save(generators(world.device), folder / f"rng-rank-{world.rank}.pt")
    if world.is_main:
        state = {**state, "parameters": parameter_shapes(engine.model), "checksums": checksums}
        files.save_text(json.dumps(state, indent=1) + "\n", folder / STATE)


def manifest_of(engine: Engine, progress: Progress, validation_loss: float | None, key: Key | None) -> dict[str, Any]:
    """All of the manifest but its files."""
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
        "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers")},
    }


_ANEW = "start anew with run.resume=never or another run.name"


LAYOUT = ("world size", "ZeRO stage", "precision.compute", "offload")
"""What a run may change as it goes on: how the masters are cut up, and what is computed with (docs/elastic.md)."""


_BEFORE = {"data.document_masking": False}
"""What checkpoints were that do not say it."""


def other_identity(theirs: dict[str, Any], mine: dict[str, Any]) -> str | None:
    """The first of `mine` that is another one in `theirs`, in words; None when there is none."""
    theirs = {**_BEFORE, **theirs}
    for key, value in mine.items():
        if key not in LAYOUT and theirs.get(key) != value:
            return f"{key} is {theirs.get(key)} there and {value} in this run; use the same {key}, or {_ANEW}"
    return None


def other_layout(theirs: dict[str, Any], mine: dict[str, Any]) -> str | None:
    """How the layout differs, such as "world size 2 -> 4"; None where it does not."""
    changes = [
        f"{key} {theirs.get(key)} -> {mine[key]}" for key in LAYOUT if key in mine and theirs.get(key) != mine[key]
    ]
    return ", ".join(changes) or None


def parameter_shapes(model: torch.nn.Module) -> dict[str, list[int]]:
    """Every parameter's whole shape by name, also where ZeRO-3 holds it in parts."""
    return {name: list(shape_of(parameter)) for name, parameter in model.named_parameters()}


def other_parameters(theirs: dict[str, list[int]], mine: dict[str, list[int]]) -> str | None:
    """The first parameter that has another shape or is only in one of them, in words; None when there is none."""
    for name in [*mine, *theirs]:
        if theirs.get(name) != mine.get(name):
            shapes = f"{name} has shape {theirs.get(name)} there and {mine.get(name)} in this run"
            return f"{shapes}; it is of another model; {_ANEW}"
    return None
