"""The facts of a run that decide its numerics, from a DeepSpeed JSON and the files and options around it.

A trainer's file is told by its keys, as names.yaml has them: Hugging Face's TrainingArguments (as passed to a script
or as saved; TRL's and LLaMA-Factory's too), axolotl's YAML, or Accelerate's.
"""

from __future__ import annotations

import contextlib
import re
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import VERSION_PATTERN, Version

from config import json_text, yaml_text
from config.deepspeed.document import leaves, offload, read_document, unknown_keys
from config.deepspeed.keys import REFUSED, SECTIONS
from config.errors import UserError, one_line
from config.load import show


def read_data(name: str) -> Any:
    """A YAML file of this folder."""
    return yaml_text.parse(Path(__file__).with_name(name).read_text(encoding="utf-8"))


NAMES: dict[str, Any] = read_data("names.yaml")
KINDS: dict[str, Any] = NAMES["trainer_files"]
ACCELERATE = "Accelerate YAML"
ABSENT = "absent"
"""The value of a key that the JSON does not have."""


class TrainerFile(NamedTuple):
    """The config of a trainer, of a kind in KINDS."""

    path: Path
    kind: str
    decided: dict[str, Any]
    """Decisions in common names; a name is missing where the file leaves the decision to somebody else."""
    json: tuple[str, dict[str, Any]] | None
    """The DeepSpeed JSON that it names, holds or stands for, and where that is from."""


class Given(NamedTuple):
    """A run, as its configs describe it: where that is from, the DeepSpeed JSON, what follows (None: not known), and
    the versions of packages (None: neither installed nor given)."""

    sources: list[str]
    document: dict[str, Any]
    facts: dict[str, Any]
    versions: dict[str, str | None]

    def fact(self, name: str) -> Any:
        """A fact, or after `json.` the value of a key of the JSON. None: not known."""
        if not name.startswith("json."):
            return self.facts.get(name)
        value = dict(leaves(self.document)).get(name.removeprefix("json."), ABSENT)
        return None if value == "auto" else value


def read_given(
    files: list[TrainerFile], json_file: tuple[str, dict[str, Any]] | None, given: dict[str, Any], with_: list[str]
) -> Given:
    """The run. given: what the command line decides, which comes first. with_: its versions. Raises UserError."""
    named = json_file or next((file.json for file in files if file.json), None)
    if named is None:
        raise UserError(f"{files[0].path}: names no DeepSpeed JSON; add --deepspeed-config ds.json")
    source, document = named
    decided: dict[str, Any] = {"dtype": "fp32"} if files else {}
    for file in sorted(files, key=lambda file: file.kind != ACCELERATE):  # a script's arguments come after
        decided |= file.decided
    decided |= {name: value for name, value in given.items() if value is not None}
    if not (SECTIONS[""] | REFUSED).keys() & document.keys():
        keys = ", ".join(list(document)[:5]) or "none"
        raise UserError(f"{source}: is no DeepSpeed JSON: it has none of its keys (it has: {keys})")
    open_ = next((key for key, value in leaves(document) if value == "auto"), None)
    if open_ and decided.get("trainer") == "own":
        problem = "is filled in by Hugging Face's trainers only; write a value, or leave --trainer own out"
        raise UserError(f'{source}: {open_} = "auto" {problem}')
    unknown_keys(Path(source), document)
    if all(document.get(name, {}).get("enabled") is True for name in ("bf16", "fp16")):
        raise UserError(f"{source}: bf16.enabled and fp16.enabled are both true; set one of them to false")
    versions = _versions(with_)
    sources = [source, *(str(file.path) for file in files if not source.startswith(str(file.path)))]
    return Given(sources, document, _facts(document, decided, versions), versions)


def _versions(with_: list[str]) -> dict[str, str | None]:
    """Installed versions, and those of --with in place of them."""
    found: dict[str, str | None] = dict.fromkeys(NAMES["packages"])
    for package in found:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    for text in with_:
        package, _, version = text.replace("==", "=").partition("=")
        if package not in found or not re.fullmatch(VERSION_PATTERN, version, re.VERBOSE | re.IGNORECASE):
            raise UserError(f"--with {text}: is not one of {', '.join(found)} and its version, as deepspeed=0.18.2")
        found[package] = version
    return found


def _facts(document: dict[str, Any], decided: dict[str, Any], versions: dict[str, str | None]) -> dict[str, Any]:
    """The facts by which known.yaml tells what a run hits."""
    values = {key: value for key, value in leaves(document) if value is not None}
    written = {key: None if value == "auto" else value for key, value in values.items()}
    autos = [key for key, value in values.items() if value == "auto" and not key.startswith(tuple(NAMES["filled"]))]
    dtype, newest = _dtype(values, decided), versions["transformers"] is None
    found: dict[str, Any] = dict.fromkeys(("use_cpu", "tiled_mlp", "precomputed_reference"), False)
    # the Trainer's default, huggingface/transformers#39395
    found["tokens_across_devices"] = newest or Version(str(versions["transformers"])) >= Version("4.54.0")
    found["sequence_ranks"] = written.get("sequence_parallel_size", 1)
    found["compile"] = any(key.startswith("compile.") for key in values) and not values.get("compile.disable")
    found["pipeline"] = any(key.startswith("pipeline.") for key in values)
    found["trainer"] = "hf" if "auto" in values.values() else "own"
    found |= decided | {"dtype": dtype, "autos_left": len(autos), "accumulation": _accumulation(values, decided)}
    found |= {"stage": int(written.get("zero_optimization.stage") or 0), "offload": offload(document)}
    name = str(decided.get("optimizer") or written.get("optimizer.type") or "adamw").lower()
    known = (one for one, names in NAMES["optimizers"].items() if name in names)
    found["optimizer"] = next(known, name.removeprefix("deepspeed").removeprefix("fused"))
    lean = [name for name in ("bf16", "fp16") if written.get(f"{name}.{name}_master_weights_and_grads")]
    found["masters"] = lean[0] if lean else "fp32"
    for does, key in (("summed_in", "data_types.grad_accum_dtype"), ("reduced_in", "communication_data_type")):
        found[does] = written.get(key, dtype or "that of the weights")
    autocast = values.get("torch_autocast.dtype", "bfloat16")
    found["autocast"] = autocast if values.get("torch_autocast.enabled") else "none"
    scaling = "static" if written.get("fp16.loss_scale") else "dynamic"
    found["loss_scale"] = "none" if dtype in ("fp32", "bf16") else scaling
    asked, release = decided.get("clipping"), versions["deepspeed"]
    # the default, deepspeedai/DeepSpeed#8068
    default = None if release is None else 1.0 if Version(release) >= Version("0.19.3") else 0.0
    clipping = values.get("gradient_clipping", default)
    found["clipping"] = asked if clipping == "auto" else clipping
    in_vain = "gradient_clipping" not in values and None not in (asked, default) and asked != default
    return found | {"clipping_ignored": in_vain}


def _accumulation(values: dict[str, Any], decided: dict[str, Any]) -> int | None:
    """Micro-batches of a rank in a step."""
    written = values.get("gradient_accumulation_steps", decided.get("accumulation"))
    if written is not None:
        return decided.get("accumulation") if written == "auto" else written
    batch, micro = (values.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu"))
    if not (isinstance(batch, int) and isinstance(micro, int)):
        return 1
    return batch // (micro * decided["ranks"]) if "ranks" in decided else None


def _dtype(values: dict[str, Any], decided: dict[str, Any]) -> str | None:
    """Dtype that the model is cast to: by the JSON, and where it leaves that open, or says nothing, by the trainer."""
    flags = {name: values.get(f"{name}.enabled", ABSENT) for name in ("bf16", "fp16", "bfloat16")}
    on = [name for name, flag in flags.items() if flag is True]
    wanted = decided.get("dtype")
    if on or (wanted in flags and flags[wanted] is not False):
        return "fp16" if (on[0] if on else wanted) == "fp16" else "bf16"
    return None if wanted is None and "auto" in flags.values() else "fp32"


def read_model(model: str) -> dict[str, Any]:
    """Numerics that a model's config.json names. model: a folder, or a name whose config is cached."""
    from huggingface_hub import try_to_load_from_cache

    path = Path(model) / "config.json"
    if not path.is_file():
        with contextlib.suppress(ValueError):  # not a name as the hub has it
            path = Path(str(try_to_load_from_cache(model, "config.json")))
    if not path.is_file():
        raise UserError(f"--model {model}: is no folder with a config.json, nor in the Hugging Face cache here")
    config = json_text.read_object(path, "model's config")
    inner = config.get("text_config") or config
    drops = any(value for key, value in inner.items() if "drop" in key and isinstance(value, int | float))
    return {"model_type": inner.get("model_type"), "dropout": drops}


def read_trainer_file(path: Path) -> TrainerFile:
    """Raises UserError for a file that none of these trainers reads, or one that does not start DeepSpeed."""
    try:
        values: Any = yaml_text.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as YAML or JSON: {one_line(error)}") from error
    values = {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}
    kind = next((kind for kind, known in KINDS.items() if values.keys() & set(known["told_by"])), None)
    if kind is None:
        raise UserError(f"{path}: is no {', '.join(KINDS)}: its keys are {', '.join(list(values)[:6]) or 'none'}")
    used, written = values.get("distributed_type"), dict(leaves(values))
    if kind == ACCELERATE and used != "DEEPSPEED":
        raise UserError(f"{path}: distributed_type = {show(used)} does not start DeepSpeed; give the file that does")
    found: dict[str, Any] = {"trainer": "hf"}
    for name, keys in KINDS[kind]["decides"].items():
        known = (written[key] for key in keys.split() if key in written)
        found[name] = next(known, KINDS[kind]["otherwise"].get(name))
    if kind == ACCELERATE:
        found["dtype"] = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}.get(values.get("mixed_precision"), "fp32")
    else:
        found["dtype"] = next((name for name in ("bf16", "fp16") if values.get(name) not in (None, False)), None)
    found = {name: value for name, value in found.items() if value not in (None, "auto")}
    for name in found.keys() & {"clipping", "accumulation", "ranks", "sequence_ranks"}:
        if not isinstance(found[name], int | float):
            raise UserError(f"{path}: {name} = {show(found[name])} is not a number")
    return TrainerFile(path, kind, found, _json_of(path, kind, values))


def _json_of(path: Path, kind: str, values: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    given = values.get("deepspeed_config")
    plugin: dict[str, Any] = given if isinstance(given, dict) else {}
    named = plugin.get("deepspeed_config_file") or values.get("deepspeed")
    if isinstance(named, dict):
        return f"{path}: deepspeed", named
    if isinstance(named, str):
        file = next((base / named for base in (Path(), path.parent) if (base / named).exists()), Path(named))
        return str(file), read_document(file)
    if kind != ACCELERATE:
        return None
    # what Accelerate's DeepSpeedPlugin makes of its own settings
    zero: dict[str, Any] = {"stage": plugin.get("zero_stage", 2)}
    for what in ("optimizer", "param"):
        zero[f"offload_{what}"] = {"device": plugin.get(f"offload_{what}_device") or "none"}
    batch = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    decided = {name: plugin.get(name, "auto") for name in ("gradient_accumulation_steps", "gradient_clipping")}
    return f"{path}: deepspeed_config", {**batch, **decided, "zero_optimization": zero}
