"""Reads the config of another trainer, and says in common names what it decides about a step.

A file is told by its keys, as trainers.yaml has them: Hugging Face's TrainingArguments (as passed to a script or as
saved; TRL's and LLaMA-Factory's too), axolotl's YAML, or Accelerate's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from config import json_text, yaml_text
from config.deepspeed.document import leaves, read_document
from config.errors import UserError, one_line
from config.load import show

KINDS: dict[str, Any] = yaml_text.parse(Path(__file__).with_name("trainers.yaml").read_text(encoding="utf-8"))
ACCELERATE = "Accelerate YAML"


class TrainerFile(NamedTuple):
    """The config of a trainer, of a kind in KINDS."""

    path: Path
    kind: str
    values: dict[str, Any]


def read_trainer_file(path: Path) -> TrainerFile:
    """Raises UserError for a file that none of these trainers reads, or one that does not start DeepSpeed."""
    values: Any
    if path.suffix == ".json":
        values = json_text.read_object(path, "trainer's config")
    else:
        try:
            values = yaml_text.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read as YAML: {one_line(error)}") from error
    values = {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}
    kind = next((kind for kind, known in KINDS.items() if values.keys() & set(known["told_by"])), None)
    if kind is None:
        raise UserError(f"{path}: is no {', '.join(KINDS)}: its keys are {', '.join(list(values)[:6]) or 'none'}")
    used = values.get("distributed_type")
    if kind == ACCELERATE and used != "DEEPSPEED":
        raise UserError(f"{path}: distributed_type = {show(used)} does not start DeepSpeed; give the file that does")
    return TrainerFile(path, kind, values)


def document_of(file: TrainerFile) -> tuple[str, dict[str, Any]] | None:
    """The DeepSpeed JSON that a trainer's file names, holds or stands for, and where it is from."""
    given = file.values.get("deepspeed_config")
    plugin: dict[str, Any] = given if isinstance(given, dict) else {}
    named = plugin.get("deepspeed_config_file") or file.values.get("deepspeed")
    if isinstance(named, dict):
        return f"{file.path}: deepspeed", named
    if isinstance(named, str):
        path = next((base / named for base in (Path(), file.path.parent) if (base / named).exists()), Path(named))
        return str(path), read_document(path)
    if file.kind != ACCELERATE:
        return None
    # what Accelerate's DeepSpeedPlugin makes of its own settings
    zero: dict[str, Any] = {"stage": plugin.get("zero_stage", 2)}
    for what in ("optimizer", "param"):
        zero[f"offload_{what}"] = {"device": plugin.get(f"offload_{what}_device") or "none"}
    batch = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    decided = {name: plugin.get(name, "auto") for name in ("gradient_accumulation_steps", "gradient_clipping")}
    return f"{file.path}: deepspeed_config", {**batch, **decided, "zero_optimization": zero}


def decisions(file: TrainerFile) -> dict[str, Any]:
    """Decisions of the file, in common names; a name is missing where it leaves the decision to somebody else."""
    kind, values = KINDS[file.kind], dict(leaves(file.values))
    found: dict[str, Any] = {"trainer": "hf"}
    for name, keys in kind["decides"].items():
        known = (values[key] for key in keys.split() if key in values)
        found[name] = next(known, kind["otherwise"].get(name))
    if file.kind == ACCELERATE:
        found["dtype"] = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}.get(str(values.get("mixed_precision")), "fp32")
    else:
        found["dtype"] = next((name for name in ("bf16", "fp16") if values.get(name) not in (None, False)), None)
    found = {name: value for name, value in found.items() if value not in (None, "auto")}
    for name in found.keys() & {"clipping", "accumulation", "ranks", "sequence_ranks"}:
        if not isinstance(found[name], int | float):
            raise UserError(f"{file.path}: {name} = {show(found[name])} is not a number")
    return found
