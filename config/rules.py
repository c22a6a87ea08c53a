"""What must hold between the keys of a run config, beyond each key's own type and range."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from config.errors import UserError
from config.schema import Config

# Arguments of a Hugging Face config that a key of the run config decides: two owners would disagree in silence.
_OWNED_MODEL_ARGUMENTS = {
    "dtype": "precision.compute",
    "torch_dtype": "precision.compute",
    "attn_implementation": "model.attention",
    "_attn_implementation": "model.attention",
}

# A dotted key, and what is wrong with it in words that follow its name.
Problem = tuple[str, str]


def check(config: Config, origin: Callable[[str], str]) -> None:
    """Hold the rules; `origin(key)` is where the user wrote a key.

    Raises:
        UserError: the first rule that is broken: the keys that do not fit together and what to change.
    """
    for rule in (_run, _model, _data, _schedule, _precision, _evaluate, _faults):
        for key, text in rule(config):
            raise UserError(f"{origin(key)}: {key} {text}")


def _run(config: Config) -> Iterator[Problem]:
    run = config.run
    if run.name in ("", ".", "..") or "/" in run.name or "\\" in run.name:
        yield "run.name", f"= '{run.name}' is not the name of a folder; leave out slashes, and set run.dir for the path"
    if run.resume not in ("auto", "never") and not Path(run.resume).expanduser().exists():
        yield "run.resume", f"= '{run.resume}' does not exist; write auto, never or the path of a checkpoint"


def _model(config: Config) -> Iterator[Problem]:
    model, name = config.model, config.model.name_or_path
    if name is None and model.architecture is None:
        fix = "set it (to llama, say) to train from scratch, or model.name_or_path to load weights"
        yield "model.architecture", f"is missing; {fix}"
    if name is not None and model.architecture is not None:
        yield "model.name_or_path", f"= '{name}' excludes model.architecture = '{model.architecture}'; keep one of them"
    if name is not None and name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().is_dir():
        yield "model.name_or_path", f"= '{name}' is not a folder; give a model folder or a hub id"
    for argument, owner in _OWNED_MODEL_ARGUMENTS.items():
        if argument in model.config:
            yield f"model.config.{argument}", f"is decided by {owner}; remove it here and set {owner}"


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.source == "stdlib" and data.path is not None:
        fix = "set data.source to text, jsonl, parquet or hub"
        yield "data.path", f"= '{data.path}' is not read by data.source = stdlib; {fix}"
    if data.source != "stdlib" and data.path is None:
        yield "data.path", f"is missing; data.source = {data.source} needs it"
    if data.source in ("text", "jsonl", "parquet") and data.path is not None and not _matches(data.path):
        yield "data.path", f"= '{data.path}' matches no file; give a file, a folder or a glob that exists"
    if data.name is not None and data.source != "hub":
        yield "data.name", f"= '{data.name}' is only read by data.source = hub; remove it"
    if data.tokenizer.startswith("bpe:") and not data.tokenizer.removeprefix("bpe:").isdecimal():
        yield "data.tokenizer", f"= '{data.tokenizer}' names no vocabulary size; write it as bpe:4096"


def _matches(pattern: str) -> bool:
    """Whether a path or glob names something that exists."""
    path = Path(pattern).expanduser()
    return path.exists() or any(Path(path.anchor).glob(str(path.relative_to(path.anchor))))


def _schedule(config: Config) -> Iterator[Problem]:
    warmup, steps, decay = config.schedule.warmup_steps, config.run.steps, config.schedule.decay_fraction
    if warmup > steps:
        yield "schedule.warmup_steps", f"= {warmup} is more than run.steps = {steps}; make it smaller"
    elif config.schedule.name == "wsd" and warmup + decay * steps > steps:
        left = f"leaves no room for schedule.warmup_steps = {warmup}"
        yield "schedule.decay_fraction", f"= {decay:g} of run.steps = {steps} {left}; make one of them smaller"


def _precision(config: Config) -> Iterator[Problem]:
    precision, scale, key = config.precision, config.precision.loss_scale, "precision.loss_scale"
    if precision.path == "manifest":
        yield "precision.path", "= manifest is not built yet; use cast"
    if precision.manifest is not None:
        yield "precision.manifest", "is only read by precision.path = manifest; remove it"
    if scale.policy == "static":
        return
    if math.frexp(scale.initial)[0] != 0.5:
        nearest = 2.0 ** round(math.log2(scale.initial))
        problem = "is not a power of two, which the dynamic policy needs"
        yield f"{key}.initial", f"= {scale.initial:g} {problem}; the nearest is {nearest:g}"
    if not scale.minimum.is_integer():
        yield (
            f"{key}.minimum",
            f"= {scale.minimum:g} is not a whole number, and DeepSpeed takes no other; write 1 or more",
        )
    if scale.initial < scale.minimum:
        yield f"{key}.initial", f"= {scale.initial:g} is below {key}.minimum = {scale.minimum:g}; raise it"


def _evaluate(config: Config) -> Iterator[Problem]:
    if config.evaluate.every_steps and config.data.validation_fraction == 0:
        fix = "set data.validation_fraction above 0"
        yield "evaluate.every_steps", f"= {config.evaluate.every_steps} needs held-out text; {fix}"


def _faults(config: Config) -> Iterator[Problem]:
    for index, fault in enumerate(config.faults):
        if fault.step > config.run.steps:
            problem = f"is after the last step, run.steps = {config.run.steps}; it would never strike"
            yield f"faults[{index}].step", f"= {fault.step} {problem}"
