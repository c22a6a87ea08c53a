"""What goes into a checkpoint: every rank's files, and what the manifest says of them."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.checkpoint.manifest import FORMAT, STATE
from training.checkpoint_identity import parameter_shapes
from training.elastic_shards import checksums_of
from training.engine.rng import generators
from training.progress import Progress

if TYPE_CHECKING:
    from training.checkpoint.key import Key
    from training.checkpoint.writer import Files
    from training.engine import Engine

TAG = "deepspeed"


def take(
    files: Files, folder: Path, engine: Engine, progress: Progress, reactions: dict[str, Any], identity: dict[str, Any]
) -> None:
    """Give `files` all of this rank's: copies that wait to be written, or, where nothing is copied, on disk already."""
    place, checksums = engine.place, checksums_of(engine)
    with files.written_by(engine.deepspeed):
        engine.save(folder, TAG)
    files.save(generators(place.device), folder / f"rng-rank-{place.rank}.pt")
    if place.is_main:
        state = {
            "progress": progress.state_dict(),
            "scaler": engine.scaler_state(),
            "reactions": reactions,
            "identity": identity,
            "parameters": parameter_shapes(engine.model),
            "checksums": checksums,
        }
        files.save_text(json.dumps(state, indent=1) + "\n", folder / STATE)


def manifest_of(engine: Engine, progress: Progress, validation_loss: float | None, key: Key | None) -> dict[str, Any]:
    """All of the manifest but its files."""
    regions = dict(engine.regions.dtypes) if engine.regions is not None else None
    finite = validation_loss is None or math.isfinite(validation_loss)
    return {
        "format": FORMAT,
        "step": progress.step,
        "written": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "world_size": engine.place.world_size,
        "zero_stage": engine.stage,
        "precision": {"compute": engine.compute, "regions": regions},
        "data": {"position": progress.position, "tokens": progress.tokens},
        "validation_loss": validation_loss if finite else str(validation_loss),
        "encryption": {"key": key.id} if key is not None else None,
        "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers")},
    }
