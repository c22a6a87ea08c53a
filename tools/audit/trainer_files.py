"""Reads the config of another trainer, and says in common names what it decides about a step.

A file is told by its keys: Hugging Face's TrainingArguments (as passed to a script or as saved; TRL's and
LLaMA-Factory's too), axolotl's YAML, or Accelerate's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from config import json_text, yaml_text
from config.deepspeed.document import read_document
from config.errors import UserError, one_line
from config.load import show

SIGNS = {
    "Accelerate YAML": {"compute_environment", "distributed_type"},
    "axolotl YAML": {"base_model"},
    "TrainingArguments": {"output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps"},
}
"""Kind of file to keys of which it has at least one. The first kind that fits is taken."""


class TrainerFile(NamedTuple):
    """The config of a trainer, of a kind in SIGNS."""

    path: Path
    kind: str
    values: dict[str, Any]

    @property
    def plugin(self) -> dict[str, Any]:
        """Accelerate's deepspeed_config."""
        found = self.values.get("deepspeed_config")
        return found if isinstance(found, dict) else {}


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
    kind = next((kind for kind, signs in SIGNS.items() if signs & values.keys()), None)
    if kind is None:
        raise UserError(f"{path}: is no {', '.join(SIGNS)}: its keys are {', '.join(list(values)[:6]) or 'none'}")
    if kind == "Accelerate YAML" and values.get("distributed_type") != "DEEPSPEED":
        used = show(values.get("distributed_type"))
        raise UserError(f"{path}: distributed_type = {used} does not start DeepSpeed; give the file that does")
    return TrainerFile(path, kind, values)


def document_of(file: TrainerFile) -> tuple[str, dict[str, Any]] | None:
    """The DeepSpeed JSON that a trainer's file names, holds or stands for, and where it is from."""
    named = file.plugin.get("deepspeed_config_file") or file.values.get("deepspeed")
    if isinstance(named, dict):
        return f"{file.path}: deepspeed", named
    if isinstance(named, str):
        path = next((base / named for base in (Path(), file.path.parent) if (base / named).exists()), Path(named))
        return str(path), read_document(path)
    if file.kind != "Accelerate YAML":
        return None
    # what Accelerate's DeepSpeedPlugin makes of its own settings
    zero: dict[str, Any] = {"stage": file.plugin.get("zero_stage", 2)}
    for what in ("optimizer", "param"):
        zero[f"offload_{what}"] = {"device": file.plugin.get(f"offload_{what}_device") or "none"}
    batch = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    decided = {name: file.plugin.get(name, "auto") for name in ("gradient_accumulation_steps", "gradient_clipping")}
    return f"{file.path}: deepspeed_config", {**batch, **decided, "zero_optimization": zero}


def decisions(file: TrainerFile) -> dict[str, Any]:
    """Decisions of the file, in common names; a name is missing where it leaves the decision to somebody else."""
    values, plugin = file.values, file.plugin
    found = {"trainer": "hf", "use_cpu": values.get("use_cpu"), "tiled_mlp": values.get("tiled_mlp")}
    if file.kind == "Accelerate YAML":
        parallel = values.get("parallelism_config")
        parallel = parallel if isinstance(parallel, dict) else {}
        dtype = values.get("mixed_precision")
        found |= {
            "dtype": dtype if dtype in ("bf16", "fp16") else "bf16" if dtype == "fp8" else "fp32",
            "clipping": plugin.get("gradient_clipping", 1.0),
            "accumulation": plugin.get("gradient_accumulation_steps"),
            "ranks": values.get("num_processes"),
            "sequence_ranks": parallel.get("parallelism_config_sp_size"),
            "attention": parallel.get("parallelism_config_sp_attn_implementation"),
        }
    else:
        sixteen = [name for name in ("bf16", "fp16") if values.get(name) not in (None, False)]
        found |= {
            "dtype": sixteen[0] if sixteen else None,
            "clipping": values.get("max_grad_norm", 1.0),
            "accumulation": values.get("gradient_accumulation_steps", 1),
            "optimizer": values.get("optim", values.get("optimizer", "adamw_torch")),
            "compile": values.get("torch_compile"),
            "precomputed_reference": values.get("precompute_ref_log_probs"),
            "sequence_ranks": values.get("context_parallel_size", values.get("sequence_parallel_degree")),
            "attention": values.get("attn_implementation"),
            "tokens_across_devices": values.get("average_tokens_across_devices"),
        }
    found = {name: value for name, value in found.items() if value not in (None, "auto")}
    for name in found.keys() & {"clipping", "accumulation", "ranks", "sequence_ranks"}:
        if not isinstance(found[name], int | float):
            raise UserError(f"{file.path}: {name} = {show(found[name])} is not a number")
    return found
