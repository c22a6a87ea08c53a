"""Rules between the keys of a run config, beyond each key's own type and range."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from config.deepspeed.combinations import scalar
from config.errors import UserError
from config.files import globbed
from config.optimizers import OPTIMIZERS
from config.printable import line
from config.redact import redact
from config.schema import (
    SAMPLING_TASKS,
    UNPACKED_TASKS,
    Config,
    DataSection,
    ParitySection,
    SourceSection,
    ValidationSection,
)
from config.secrets import ADVICE, WITH_PASSWORD
from config.task import CAUSAL_LM, CHUNKED_TASKS, DECIDED, ENCODER_TASKS, OWN, ROW_FORMATS, is_url, model_class_of

# Arguments of a Hugging Face config that are set by a key of the run config.
_OWNED_MODEL_ARGUMENTS = {
    "dtype": "precision.compute",
    "torch_dtype": "precision.compute",
    "attn_implementation": "model.attention",
    "_attn_implementation": "model.attention",
}

_OF_DOCUMENTS = ("text", "megatron")
"""Sources without rows."""

_QUANTISING = ("quantization_config", "load_in_4bit", "load_in_8bit")
QUANTISED_BASES = (
    "give the model in BF16, FP16 or FP32, and set adapter.base = nf4 or int8 (with adapter.kind = lora) to hold it in "
    "4 or 8 bits"
)
"""Error text for already quantised bases, and for keys that would request one."""
QUANTISED_TEACHERS = (
    "4-bit and 8-bit teachers are not supported; give the teacher in BF16, FP16 or FP32 (distill.sharded = true "
    "divides it over the ranks, distill.top_k runs it before training and frees it)"
)
"""Error text for already quantised teachers."""

_Place = DataSection | SourceSection | ValidationSection
"""A section with a path and a source."""

_LONGEST_NAME = 200  # bytes: file systems take 255, and a renamed or partial folder's name is longer

Problem = tuple[str, str]
"""A dotted key, and the text that follows it in the error."""


def check(config: Config, origin: Callable[[str], str], *, started: bool = False) -> None:
    """Raise UserError for the first broken rule. origin: where a key was written. started: by a run, whose files may be
    gone, and that may have keys without effect. Steps of run.epochs come later."""
    for rule in (
        *(_run, _model, _activation_checkpointing, *(() if started else (_ignored,))),
        *(_unread, _task, _preference, _grpo),
        *(_distill, _encoder, _seq2seq, _adapter, _verified, _mixture, _validation, _data, _documents),
        *(_optimizer, _schedule, _precision, _loss_scale, _tracking, _guard, _faults, _canary),
        *(() if started else (_places,)),
    ):
        for key, text in rule(config):
            raise UserError(f"{origin(key)}: {key} {text}")


def _run(config: Config) -> Iterator[Problem]:
    run = config.run
    if run.name in ("", ".", "..") or "/" in run.name or "\\" in run.name:
        yield "run.name", f"= '{run.name}' is not the name of a folder; leave out slashes, and set run.dir for the path"
    if line(run.name) != run.name or run.name != run.name.strip():
        yield "run.name", f"= '{run.name}' has invisible characters, as a trailing space; remove them"
    if len(run.name.encode(errors="replace")) > _LONGEST_NAME:
        problem = f"is longer than {_LONGEST_NAME} bytes, too long for the name of a folder; shorten it"
        yield "run.name", f"= '{run.name[:40]}...' {problem}"
    if redact(run.name) != run.name:
        yield "run.name", "contains what looks like a key or password, which its folder would show; remove it"
    if not run.steps and run.epochs is None:
        yield "run.steps", "= 0 trains nothing; give a number of steps, or run.epochs"


def _places(config: Config) -> Iterator[Problem]:
    """Files and folders that a run needs to start, and that may be gone once it has started."""
    run, data = config.run, config.data
    if run.resume not in ("auto", "never") and not Path(run.resume).expanduser().exists():
        yield "run.resume", f"= '{run.resume}' does not exist; write auto, never or the path of a checkpoint"
    for key, given in (("model.name_or_path", config.model.name_or_path), ("distill.teacher", config.distill.teacher)):
        if given is not None and _looks_local(given) and not Path(given).is_dir():
            yield key, f"= '{given}' is not a folder; give a model folder or a hub id"
    if _looks_local(data.tokenizer) and not Path(data.tokenizer).expanduser().exists():
        yield "data.tokenizer", f"= '{data.tokenizer}' does not exist; give a folder, a hub id, bytes or bpe:4096"
    if config.learns_rows and data.chat_template is not None and not Path(data.chat_template).expanduser().is_file():
        yield "data.chat_template", f"= '{data.chat_template}' is not a file; give one with a Jinja template"
    items: list[tuple[str, _Place]] = [(f"data.sources[{index}]", item) for index, item in enumerate(data.sources)]
    items = items or [("data", data)]
    items += [(f"data.validation[{index}]", item) for index, item in enumerate(data.validation)]
    for key, item in items:
        if item.path is not None and not _matches(item):
            yield f"{key}.path", f"= '{item.path}' matches no file; give a file, a folder or a glob that exists"


def _looks_local(name: str) -> bool:
    """Whether a name cannot be a hub id."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def _model(config: Config) -> Iterator[Problem]:
    model, name = config.model, config.model.name_or_path
    if name is None and model.architecture is None:
        fix = "set it (to llama, say) to train from scratch, or model.name_or_path to load weights"
        yield "model.architecture", f"is missing; {fix}"
    if name is not None and model.architecture is not None:
        yield "model.name_or_path", f"= '{name}' excludes model.architecture = '{model.architecture}'; keep one of them"
    for argument, owner in _OWNED_MODEL_ARGUMENTS.items():
        if argument in model.config:
            yield f"model.config.{argument}", f"is decided by {owner}; remove it here and set {owner}"
    for argument in _QUANTISING:
        if argument in model.config:
            yield f"model.config.{argument}", f"asks for a quantised base; remove it and {QUANTISED_BASES}"
    for problem, fix in liger_conflicts(config) if model.kernels == "liger" else ():
        yield "model.kernels", f"= liger {problem}; {fix}"


def _activation_checkpointing(config: Config) -> Iterator[Problem]:
    model = config.model
    mode, budget = model.activation_checkpointing, model.activation_memory_gib
    key = "model.activation_checkpointing"
    if mode == "budget" and budget is None:
        yield "model.activation_memory_gib", f"is missing for {key} = budget; set the GiB that activations may take"
    if budget is not None and config.task in ("classify", "seq2seq"):
        yield "model.activation_memory_gib", f"= {budget:g} is not verified with task = {config.task}; remove it"
    if mode in ("attention", "ops") and model.checkpointing_reentrant:
        yield "model.checkpointing_reentrant", f"= true cannot be combined with {key} = {mode}; remove it"


_Values = dict[str, tuple[Any, ...]]
_NOT_VERIFIED = "is not verified with"
_WITHOUT_BUDGET = ("none", "full", "selective", "attention", "ops")
_SLICED: _Values = {
    "adapter.kind": ("none",),
    "precision.masters": ("fp32",),
    "model.compile": (False,),
    "model.kernels": ("auto", "torch"),
    "model.activation_checkpointing": _WITHOUT_BUDGET,
}
"""Values verified for ranks that have slices, whether of matrices or of experts."""
_ROUTED: dict[str, _Values] = {
    "counts all tokens, but there is padding in batches of": {"task": ("pretrain",)},
    "needs routers, which are detached by": {"model.checkpointing_reentrant": (False,)},
    "needs routers, which cannot be observed in compiled blocks of": {"model.compile": (False,)},
}
_BESIDE: dict[str, dict[str, _Values]] = {
    "model.balance_loss": _ROUTED,
    "model.router_z_loss": _ROUTED,
    "distill.top_k": {
        "tries a batch without the teacher's answers first, and cannot be combined with": {
            "model.activation_checkpointing": _WITHOUT_BUDGET,
            "model.compile": (False,),
        },
    },
    "precision.masters": {
        "needs 16-bit parameters, which are FP32 on the manifest path of": {"precision.path": ("cast",)},
        "updates masters piece by piece, which is not shown to be exact for": {"optimizer.name": ("adamw",)},
    },
    "adapter.base": {
        _NOT_VERIFIED: {
            "adapter.kind": ("lora",),
            "model.compile": (False,),
            "precision.path": ("cast",),
            "deepspeed.offload": (None, "none"),
        },
    },
    "model.compile": {
        _NOT_VERIFIED: {
            "model.activation_checkpointing": ("none", "full", "selective"),
            "model.checkpointing_reentrant": (False,),
            "model.attention": ("auto", "sdpa", "eager"),
            "data.document_masking": (False,),
            "precision.path": ("cast",),
        },
        "cannot compile blocks whose modules are marked for": {"profile.steps": (0,)},
    },
    "guard.update_checks": {"recomputes only updates by adamw, not by": {"optimizer.name": ("adamw",)}},
    "parallel.sequence": {
        _NOT_VERIFIED: {
            "task": ("pretrain", "sft"),
            "sft.neftune_alpha": (0.0,),
            "model.attention": ("auto", "sdpa"),
            "model.compile": (False,),
        },
        "cuts rows, whose labels are counted by": {"sft.loss": ("token",)},
        "cuts sequences, which are counted whole by": {"model.activation_checkpointing": _WITHOUT_BUDGET},
        "gives ranks slices of micro-batches, which are exchanged whole by": {"guard.reexecute": ("never",)},
    },
    "parallel.tensor": {
        _NOT_VERIFIED: {
            "parallel.sequence": (1,),
            "task": ("pretrain",),
            "model.attention": ("auto", "sdpa", "eager"),
            **_SLICED,
        },
        "gives ranks slices of matrices, which have to be whole for": {
            "optimizer.name": tuple(name for name, spec in OPTIMIZERS.items() if spec.by_value),
            **dict.fromkeys(("guard.replica_checks", "guard.update_checks", "guard.gradient_checks"), (0,)),
            "guard.reexecute": ("never",),
            **dict.fromkeys(("guard.min_update_ratio", "guard.max_update_ratio"), (None,)),
            "telemetry.probe": (False,),
        },
    },
    "parallel.expert": {
        _NOT_VERIFIED: {
            **dict.fromkeys(("parallel.sequence", "parallel.tensor"), (1,)),
            "task": ("pretrain", "sft", "dpo", "distill"),  # compared with one rank, on mixtures with shared experts
            "model.checkpointing_reentrant": (False,),
            **_SLICED,
        },
        "puts other experts on the rank that repeats a suspicious step for": {
            "guard.replica_checks": (0,),
            "guard.reexecute": ("never",),
        },
        "gives a rank some experts, which are compared with all of them by": {"telemetry.probe": (False,)},
    },
}
"""Keys not at their defaults, to a problem, to other keys and the values allowed with them."""


def _verified(config: Config) -> Iterator[Problem]:
    for key, problems in _BESIDE.items():
        if attrgetter(key)(config) != attrgetter(key)(Config()):
            for problem, others in problems.items():
                yield from _beside(config, key, others, problem)
    if config.model.compile and (config.learns_rows or config.task == "classify"):
        problem = f"= true is not verified with rows, which task = {config.task} learns; remove it"
        yield "model.compile", problem  # each length compiles anew, and the ninth ends the run
    model, ranks, length = config.model, config.parallel.sequence, config.data.sequence_length
    if ranks > length:
        yield "parallel.sequence", f"= {ranks} exceeds the tokens of data.sequence_length = {length}; lower it"
    for key in ("balance_loss", "router_z_loss"):
        if getattr(model, key) and config.telemetry.probe and config.precision.path == "cast":
            problem = "is not in the gradients that telemetry.probe computes; remove telemetry.probe"
            yield f"model.{key}", f"= {getattr(model, key):g} {problem}"
    if (model.balance_loss or model.router_z_loss) and length % ranks:
        problem = f"= {ranks}: routers would count the padding of data.sequence_length = {length}"
        yield "parallel.sequence", f"{problem}; make it a multiple of {ranks}"


def _beside(config: Config, key: str, others: _Values, problem: str = _NOT_VERIFIED) -> Iterator[Problem]:
    """Refuse `key` if one of `others` has a value not allowed beside it."""
    for other, allowed in others.items():
        value = attrgetter(other)(config)
        if value not in allowed:
            either = " or ".join(", ".join(map(scalar, allowed)).rsplit(", ", 1))
            fix = f"set {other} to {either}" + (f", or remove {key}" if key != "task" else "")
            yield key, f"= {scalar(attrgetter(key)(config))} {problem} {other} = {scalar(value)}; {fix}"


def liger_conflicts(config: Config) -> Iterator[tuple[str, str]]:
    """Settings that Liger's kernels do not support, each with what to do."""
    key = "model.kernels"
    if config.model.activation_checkpointing == "ops":
        other = "model.activation_checkpointing = ops, which keeps tensors that these kernels overwrite"
        yield f"cannot be combined with {other}", "set that to attention, selective, full or none"
    if config.model.compile:
        yield "is not verified with model.compile = true", "remove one of them"
    if config.precision.path == "manifest":
        yield "cannot be combined with precision.path = manifest", f"use the cast path, or remove {key}"


def _keys(section: str, *names: str, but: Collection[str] = ()) -> list[str]:
    """Dotted keys of a section: `names`, or all except some."""
    return [f"{section}.{name}" for name in names or vars(getattr(Config(), section)) if name not in but]


_OF_ROWS = ("sft", "seq2seq", "dpo", "classify", *SAMPLING_TASKS)
_OF_GRPO = ("algorithm", *DECIDED, "beta", "correction", "correction_high", "resamples")
_Readers = tuple[tuple[str, tuple[str, ...], list[str]], ...]
_READ_BY: _Readers = (
    ("task", _OF_ROWS, _keys("data", "format", "on_bad_row", "too_long")),
    ("task", ("sft", "seq2seq", "dpo", *SAMPLING_TASKS), _keys("data", "chat_template", "packing")),
    ("task", ("sft", "dpo"), ["data.train_on"]),
    ("task", ("seq2seq", *SAMPLING_TASKS), ["data.target_length"]),
    ("task", ("classify",), _keys("data", "text_pair_field", "label_field", "tokens_field", "tags_field")),
    *(("task", (task,), _keys(task)) for task in ("sft", "classify", "mlm")),
    ("task", ("dpo",), _keys("preference")),
    ("task", ("grpo",), _keys("grpo", *_OF_GRPO)),
    ("task", SAMPLING_TASKS, _keys("grpo", but=_OF_GRPO)),
    ("task", ("distill",), _keys("distill", "ce_weight", "top_k")),
    ("task", ("distill", "opd"), _keys("distill", but=("ce_weight", "top_k"))),
    ("adapter.kind", ("lora", "dora"), _keys("adapter", but=("kind",))),
    ("adapter.base", ("nf4",), ["adapter.double_quant"]),
    ("distill.loss", ("jsd",), ["distill.beta"]),
    ("grpo.engine", ("vllm",), ["grpo.transfer", "grpo.server_seconds"]),
    ("model.activation_checkpointing", ("selective",), ["model.checkpointing_every"]),
    ("model.activation_checkpointing", ("budget",), ["model.activation_memory_gib"]),
    ("model.loss", ("chunked", "auto"), ["model.loss_chunk_tokens"]),
    ("preference.loss", ("sigmoid",), ["preference.label_smoothing"]),
    *(
        (
            "optimizer.name",
            tuple(name for name, spec in OPTIMIZERS.items() if key in spec.settings),
            [f"optimizer.{key}"],
        )
        for key in dict.fromkeys(key for spec in OPTIMIZERS.values() for key in spec.settings)
    ),
)
"""A deciding key, and its values with which other keys are read."""


_ONCE_IGNORED: _Readers = (
    ("task", CHUNKED_TASKS, ["model.loss_chunk_tokens"]),
    ("schedule.name", ("wsd",), ["schedule.decay_fraction"]),
)
"""Like `_READ_BY`, but runs of earlier versions may have these keys."""


def _ignored(config: Config) -> Iterator[Problem]:
    """Refuse what earlier versions accepted although nothing reads it."""
    if config.model.loss == "chunked" and config.task not in CHUNKED_TASKS:
        problem = f"computes a cross-entropy, which task = {config.task} does not use"
        yield "model.loss", f"= chunked {problem}; set it to auto or full"
    yield from _unread(config, _ONCE_IGNORED)
    data, usual = config.data, DataSection()
    kinds = {data.source, *(item.source for item in data.sources), *(item.source for item in data.validation)}
    if data.split != usual.split and "hub" not in kinds:
        yield "data.split", f"= '{data.split}' is only read by source = hub; remove it"
    if config.checkpoint.keep_best and not config.evaluate.every_steps:
        fix = "needs the losses of evaluations; set evaluate.every_steps, or remove it"
        yield "checkpoint.keep_best", f"= {config.checkpoint.keep_best} {fix}"
    for index, name in enumerate(config.guard.warnings):
        if getattr(config.warnings, name, 0) is None:
            yield f"guard.warnings[{index}]", f"= {name} has no bound in warnings.{name}; set that, or remove it"


def _unread(config: Config, readers: _Readers = _READ_BY) -> Iterator[Problem]:
    """Refuse keys that are set although nothing reads them."""
    usual = Config()
    for other, values, keys in readers:
        now = attrgetter(other)(config)
        for key in keys:
            value = attrgetter(key)(config)
            of_rows = now == "distill" and "sft" in values and key.startswith("data.")  # distill may learn rows
            if now in values or (of_rows and config.learns_rows) or value == attrgetter(key)(usual):
                continue
            several = " and ".join(", ".join(values).rsplit(", ", 1))
            reader, fix = f"{other} = {several}", f"set {other}={values[0]}"
            if of_rows:
                reader, fix = "task = distill on rows", "name their form as data.format"
            given = f"'{value}'" if isinstance(value, str) else scalar(value)
            yield key, f"= {given} is only read by {reader}; remove it, or {fix}"


def _task(config: Config) -> Iterator[Problem]:
    data = config.data
    if not config.learns_rows:
        return
    pairs = "preference" in (format for _, format in _formats(data))
    if config.task != "dpo" and pairs:
        problem = f"which task = {config.task} does not read; set task=dpo"
        yield "data.format", f"= preference has pairs of answers, {problem}"
    if data.packing == "best_fit" and config.task in UNPACKED_TASKS:
        yield "data.packing", f"= best_fit: rows are not packed by task = {config.task}; remove it"
    if data.document_masking and data.packing == "none" and config.task != "seq2seq":
        yield "data.document_masking", "= true: rows are not packed by data.packing = none; remove one of them"


def _preference(config: Config) -> Iterator[Problem]:
    preference, data = config.preference, config.data
    if config.task != "dpo":
        return
    for key, format in _formats(data):
        if format != "preference":
            yield f"{key}.format", f"= {format} has no pairs, which task = dpo needs; remove it, or set task=sft"
    if data.train_on != "assistant":
        yield "data.train_on", f"= {data.train_on} is not read by task = dpo, which counts both answers; remove it"
    if preference.reference == "adapter_off" and config.adapter.kind == "none":
        fix = "set it to precomputed, or adapter.kind=lora"
        yield "preference.reference", f"= adapter_off needs an adapter that can be turned off; {fix}"
    if config.model.activation_checkpointing == "budget":
        fix = "set that to full or selective"
        yield "model.activation_checkpointing", f"= budget counts single sequences, not the pairs of task = dpo; {fix}"


def _grpo(config: Config) -> Iterator[Problem]:
    section, data, batch = config.grpo, config.data, config.batch
    if config.task not in SAMPLING_TASKS:
        return
    if not section.rewards and config.task == "grpo":
        yield "grpo.rewards", "is empty; name a function, such as my_rewards:correct, or exact_match"
    if section.reward_weights and len(section.reward_weights) != len(section.rewards):
        yield "grpo.reward_weights", f"has {len(section.reward_weights)} for {len(section.rewards)} grpo.rewards"
    if section.top_p != 1.0:
        why = "the sampler would draw from another distribution than the trainer scores; leave it at 1"
        yield "grpo.top_p", f"= {section.top_p:g}: {why}"
    if section.max_new_tokens >= data.sequence_length:
        fix = f"leaves a prompt no token of data.sequence_length = {data.sequence_length}; raise that"
        yield "grpo.max_new_tokens", f"= {section.max_new_tokens} {fix}"
    if data.target_length not in (None, section.max_new_tokens):
        fix = f"answers end after grpo.max_new_tokens = {section.max_new_tokens}; remove it, or set that"
        yield "data.target_length", f"= {data.target_length}: {fix}"
    if batch.global_size % section.group_size:
        fix = "counts answers; make it a multiple of grpo.group_size = "
        yield "batch.global_size", f"= {batch.global_size} {fix}{section.group_size}"
    if (section.engine == "vllm") != bool(section.urls):
        fix = "names the servers of grpo.engine = vllm; python -m launch.rollouts starts one"
        yield "grpo.urls", f"= {list(section.urls)} {fix}"
    for url in section.urls:
        if not url.startswith(("http://", "https://")):
            yield "grpo.urls", f"= {url} is no address; write http://{url}"
    if section.engine == "vllm" and (config.adapter.kind == "dora" or config.adapter.modules_to_save):
        yield "grpo.engine", "= vllm merges what adapter.kind = lora adds, and no other part; set it to transformers"
    if section.engine == "vllm" and "promote" in config.guard.reactions:
        yield "guard.reactions", "= promote cannot change the head of a server of grpo.engine = vllm; remove promote"
    if section.correction == "mask" and "correct" in config.guard.reactions:
        yield "guard.reactions", "= correct sets grpo.correction to mask, which it is already; remove correct"
    if section.surrogate == "cispo" and section.ratio == "sequence":
        yield "grpo.ratio", "= sequence has no weight for a token, which grpo.surrogate = cispo needs; set it to token"
    if section.surrogate == "cispo" and section.clip_high is not None and section.clip_high < 1:
        fix = "the largest weight of a token by grpo.surrogate = cispo; set it to 5, or grpo.algorithm to cispo"
        yield "grpo.clip_high", f"= {section.clip_high:g} is {fix}"
    verified: dict[str, tuple[Any, ...]] = {
        "parallel.sequence": (1,),
        "parallel.tensor": (1,),
        "parallel.expert": (1,),
        "precision.path": ("cast",),
        "adapter.base": ("compute",),
        "data.source": ("auto", "jsonl", "parquet", "hub"),
    }
    if data.sources:
        yield "data.sources", f"is not verified with task = {config.task}; give one data.path instead"
    yield from _beside(config, "task", verified)
    for key, format in _formats(data):
        if format not in ("auto", "messages", "sharegpt", "alpaca", "prompt_completion"):
            yield f"{key}.format", f"= {format} has no prompt, which task = {config.task} needs; remove it"


def _distill(config: Config) -> Iterator[Problem]:
    if config.task not in ("distill", "opd"):
        return
    if config.distill.teacher is None:
        yield "distill.teacher", f"is missing for task = {config.task}; name a model folder or a hub id"
    if len({item.format == "auto" for item in config.data.sources}) > 1:
        yield "data.sources", "has sources with a format and others without, which are documents; name all, or none"
    for index, item in enumerate(config.data.validation if config.task == "distill" else ()):
        if (item.format == "auto") == config.learns_rows:
            fix = "name a format here and there, or in neither"
            yield f"data.validation[{index}].format", f"= {item.format}: one of it and the data are documents; {fix}"


def _encoder(config: Config) -> Iterator[Problem]:
    task, data = config.task, config.data
    if task not in ENCODER_TASKS:
        return
    if data.document_masking:
        yield "data.document_masking", f"= true is not read by task = {task}; remove it"
    if task == "mlm":
        return
    kind, labels = config.classify.kind, config.classify.labels
    for key, format in _formats(data):
        if format not in ("auto", ROW_FORMATS[kind]):
            yield f"{key}.format", f"= {format} contradicts classify.kind = {kind}; remove it, for {ROW_FORMATS[kind]}"
    if len(set(labels)) < len(labels):
        yield "classify.labels", "names a label twice; give each once"
    if len(labels) == 1:
        yield "classify.labels", "names one label; give two or more, or none for those of the data"
    if labels and kind == "regression":
        yield "classify.labels", "is not read by classify.kind = regression, which predicts a number; remove it"
    if data.text_pair_field is not None and kind == "token":
        yield "data.text_pair_field", f"= '{data.text_pair_field}' is not read by classify.kind = token; remove it"
    kinds = {item.source for item in (*(data.sources or (data,)), *data.validation)}
    if "stdlib" in kinds and kind != "sequence":
        yield "classify.kind", f"= {kind}: data.source = stdlib has labels for kind = sequence; set data.path to rows"


def _seq2seq(config: Config) -> Iterator[Problem]:
    if config.task != "seq2seq":
        return
    data = config.data
    if data.document_masking:
        yield "data.document_masking", "= true: rows are not packed by task = seq2seq; remove it"
    for key, format in _formats(data):
        if format in ("text", *ROW_FORMATS.values()):
            fix = "give prompt_completion, alpaca or messages"
            yield f"{key}.format", f"= {format} has no source and target, which task = seq2seq needs; {fix}"


def _adapter(config: Config) -> Iterator[Problem]:
    adapter, model = config.adapter, config.model
    if adapter.kind == "none":
        return
    if model.name_or_path is None:
        yield "adapter.kind", f"= {adapter.kind} needs a model to adapt; set model.name_or_path"
    if model.checkpointing_reentrant:
        yield "model.checkpointing_reentrant", "= true gives a frozen model no gradients; set it to false"
    if not adapter.target_modules:
        yield "adapter.target_modules", "is empty; name modules, or all-linear"
    if len(adapter.target_modules) > 1 and "all-linear" in adapter.target_modules:
        yield "adapter.target_modules", "names all-linear and others; all-linear stands alone"
    if adapter.base != "compute" and model_class_of(config) != CAUSAL_LM:
        yield "adapter.base", f"= {adapter.base} is for causal language models, not task = {config.task}; remove it"


def _mixture(config: Config) -> Iterator[Problem]:
    sources = config.data.sources
    if not sources:
        return
    if config.data.path is not None:
        yield "data.path", f"= '{config.data.path}' is not read beside data.sources; make it one of them"
    if len({item.name for item in sources}) < len(sources):
        yield "data.sources", "has two sources with the same name; give each its own"
    weighted = [item for item in sources if item.weight is not None]
    if weighted and (len(weighted) < len(sources) or any(item.epochs is not None for item in sources)):
        yield "data.sources", "has sources with a weight and others without; give all a weight, or none"
    if config.data.tokenizer.startswith("bpe:"):
        yield "data.tokenizer", f"= {config.data.tokenizer} is trained on one source; name one for all data.sources"
    for index, item in enumerate(sources):
        yield from _item(config, f"data.sources[{index}]", item)


def _validation(config: Config) -> Iterator[Problem]:
    sets = config.data.validation
    names = [*(item.name for item in config.data.sources), *(item.name for item in sets)]
    if len(set(names)) < len(names):
        yield "data.validation", "has a name that another set or source has; give each its own"
    if OWN in {item.name for item in sets}:
        yield "data.validation", f"names a set '{OWN}', the name of the data's own held-out set; choose another"
    trained = [_rows_of(config.data, item) for item in (config.data.sources or (config.data,))]
    for index, item in enumerate(sets):
        yield from _item(config, f"data.validation[{index}]", item)
        if _rows_of(config.data, item) in trained:
            yield f"data.validation[{index}]", "names the rows that are trained on; name another path, or another split"
    if config.evaluate.every_steps and config.data.validation_fraction == 0 and not sets:
        fix = "set data.validation_fraction above 0, or name data.validation"
        yield "evaluate.every_steps", f"= {config.evaluate.every_steps} needs held-out text; {fix}"


def _item(config: Config, key: str, item: _Place) -> Iterator[Problem]:
    """Problems of one path and source: of the data, one of several sources, or a validation set."""
    if item.source != "stdlib" and item.path is None:
        yield f"{key}.path", f"is missing; {key}.source = {item.source} needs it"
    if item.source in _OF_DOCUMENTS and (config.learns_rows or config.task == "classify"):
        yield f"{key}.source", f"= {item.source} has no rows; give rows as jsonl or parquet, or set task=pretrain"
    for name in ("split", "configuration") if isinstance(item, ValidationSection) and item.source != "hub" else ():
        if getattr(item, name) is not None:
            yield f"{key}.{name}", f"= '{getattr(item, name)}' is only read by source = hub; remove it"
    yield from _url(f"{key}.path", item)


def _rows_of(data: DataSection, item: _Place) -> tuple[str | None, ...]:
    """Values that decide the rows of a path and source."""
    of_hub = (item.split or data.split, getattr(item, "configuration", None) or data.name)
    return item.source, item.path, *(of_hub if item.source == "hub" else ())


def _formats(data: DataSection) -> list[tuple[str, str]]:
    """Each data.format with the key of its section: the data, each source and each validation set."""
    of_sources = ((f"data.sources[{i}]", item.format) for i, item in enumerate(data.sources))
    of_sets = ((f"data.validation[{i}]", item.format) for i, item in enumerate(data.validation))
    return [("data", data.format), *of_sources, *of_sets]


def _documents(config: Config) -> Iterator[Problem]:
    """Check how documents are found in data.source or in each of data.sources."""
    data = config.data
    kinds = {item.source for item in (*(data.sources or (data,)), *data.validation)}
    if data.document_separator is not None and "text" not in kinds:
        key, given = "data.document_separator", json.dumps(data.document_separator)
        yield key, f"= {given} is only read by data.source = text; remove it, or set that"
    if data.document_separator == "":
        yield "data.document_separator", "is empty; give the separator between documents, or null"
    ids = data.input_ids_field
    if data.begin_of_document != "none" and (config.learns_rows or config.task in ENCODER_TASKS):
        yield "data.begin_of_document", "= auto is for documents of task = pretrain and distill; remove it"
    if data.begin_of_document != "none" and (ids is not None or "megatron" in kinds):
        yield "data.begin_of_document", "= auto adds nothing to documents that are tokens already; remove it"
    if ids is not None and (config.learns_rows or config.task == "classify"):
        problem = f"= '{ids}' is for documents, and task = {config.task} trains on rows"
        yield "data.input_ids_field", f"{problem}; remove it, or set task=pretrain"
    if ids is not None and not kinds & {"jsonl", "parquet", "hub"}:
        yield "data.input_ids_field", f"= '{ids}' is only read by data.source = jsonl, parquet and hub; remove it"
    if data.tokenizer.startswith("bpe:") and (ids is not None or "megatron" in kinds):
        fix = "name the one that made the tokens"
        yield "data.tokenizer", f"= {data.tokenizer} is trained on text, and the data are tokens already; {fix}"


def _url(key: str, item: _Place) -> Iterator[Problem]:
    if item.path is None or not is_url(item.path):
        return
    if WITH_PASSWORD.search(item.path) or redact(item.path) != item.path:
        yield key, f"holds what looks like a credential, which would be recorded; take it out and {ADVICE}"
    if item.source == "megatron":
        yield key, f"= '{item.path}' is a URL, and files of source = megatron are mapped into memory; copy them to disk"
    elif item.source not in ("text", "jsonl", "parquet"):
        yield key, f"= '{item.path}' is a URL, which source = {item.source} does not read; use text, jsonl or parquet"


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.tokenizer == "model":
        yield "data.tokenizer", "= model needs model.name_or_path; set that, or name a tokenizer"
    if data.sources:
        return
    if data.source == "stdlib" and data.path is not None:
        fix = "set data.source to text, jsonl, parquet, megatron or hub"
        yield "data.path", f"= '{data.path}' is not read by data.source = stdlib; {fix}"
    yield from _item(config, "data", data)
    if data.name is not None and data.source != "hub":
        yield "data.name", f"= '{data.name}' is only read by data.source = hub; remove it"
    size = data.tokenizer.removeprefix("bpe:")
    if size != data.tokenizer and not (size.isdecimal() and int(size) > 256):
        yield "data.tokenizer", f"= '{data.tokenizer}' names no vocabulary size of 257 or more; write it as bpe:4096"


def _matches(item: _Place) -> bool:
    """Whether a path to files names something that exists; it may be a glob."""
    if item.path is None or item.source not in ("text", "jsonl", "parquet", "megatron") or is_url(item.path):
        return True
    path = Path(item.path).expanduser()
    if path.exists() or (item.source == "megatron" and Path(f"{path}.idx").exists()):
        return True
    return any(globbed(Path(path.anchor), path.relative_to(path.anchor).parts))


def _optimizer(config: Config) -> Iterator[Problem]:
    section = config.optimizer
    if section.learning_rate == 0 and any(group.learning_rate is not None for group in section.groups):
        yield "optimizer.groups", "gives a learning rate while optimizer.learning_rate = 0; set the latter"


def _schedule(config: Config) -> Iterator[Problem]:
    warmup, steps, decay = config.schedule.warmup_steps, config.scheduled_steps, config.schedule.decay_fraction
    length = "schedule.steps" if config.schedule.steps else "run.steps"
    if steps < config.run.steps:
        problem = f"is less than run.steps = {config.run.steps}, whose last steps would have no learning rate"
        yield "schedule.steps", f"= {steps} {problem}; make it larger or leave it out"
    if 0 < steps < warmup:
        yield "schedule.warmup_steps", f"= {warmup} is more than {length} = {steps}; make it smaller"
    elif config.schedule.name == "wsd" and steps and warmup + decay * steps > steps:
        left = f"leaves no room for schedule.warmup_steps = {warmup}"
        yield "schedule.decay_fraction", f"= {decay:g} of {length} = {steps} {left}; make one of them smaller"


def _precision(config: Config) -> Iterator[Problem]:
    precision = config.precision
    if precision.path == "manifest":
        if precision.manifest is None:
            yield "precision.manifest", "is missing for precision.path = manifest; name a JSON precision manifest"
        if precision.routers != "fp32":
            fix = 'remove it, and write a rule with "module_class": "*Router" into the manifest'
            yield "precision.routers", f"= {precision.routers} is for precision.path = cast; {fix}"
        if precision.compute not in ("auto", "fp32"):
            manifest = f"precision.manifest = '{precision.manifest}', whose parameters stay in FP32"
            problem = f"= {precision.compute} cannot be combined with precision.path = manifest and {manifest}"
            yield "precision.compute", f"{problem}; remove it, or set precision.manifest=null"
    elif precision.manifest is not None:
        yield "precision.manifest", "is only read by precision.path = manifest; remove it, or precision.path = cast"
    if precision.masters != "split":  # config/deepspeed/resolve.py checks them against the JSON
        return
    keep = "or remove precision.masters"
    if precision.compute in ("fp32", "fp16"):
        yield "precision.masters", f"= split {needs_bf16(precision.compute)}; set precision.compute to bf16, {keep}"
    for index, fault in enumerate(config.faults):
        if fault.kind == "flipped_bit" and fault.place == "master":
            problem = "= master changes an FP32 master, and precision.masters = split keeps none in memory"
            yield f"faults[{index}].place", f"{problem}; use weight, which is its upper half, {keep}"


def needs_bf16(compute: str) -> str:
    """Why precision.masters = split is refused for another dtype."""
    why = {
        "fp32": "and in FP32 there is none: weights are as wide as masters",
        "fp16": "and FP16 has a narrower exponent than FP32, so that the rest does not fit into 16 bits",
    }
    return f"holds an FP32 master as its 16-bit weight and a remainder, {why[compute]}"


def _loss_scale(config: Config) -> Iterator[Problem]:
    scale, key = config.precision.loss_scale, "precision.loss_scale"
    if scale.policy == "static":
        return
    adaptive, first = scale.policy == "adaptive", scale.initial_scale
    powers = {"initial": first, "maximum": scale.maximum}
    powers |= {"minimum": scale.minimum, "factor": scale.factor} if adaptive else {}
    for name, value in powers.items():
        if value is not None and math.frexp(value)[0] != 0.5:
            nearest = 2.0 ** round(math.log2(value))
            problem = f"is not a power of two, which policy: {scale.policy} needs"
            yield f"{key}.{name}", f"= {value:.15g} {problem}; the nearest is {nearest:.15g}"
    if not adaptive and scale.factor != 2:
        fix = "set policy: adaptive, or remove factor"
        yield f"{key}.factor", f"= {scale.factor:g} is not read by policy: deepspeed, which halves and doubles; {fix}"
    for item in fields(scale):
        if not adaptive and item.name.startswith("escalate_") and getattr(scale, item.name) != item.default:
            yield f"{key}.{item.name}", f"= {getattr(scale, item.name)} is only read by policy: adaptive; remove it"
    if not scale.minimum.is_integer():
        yield f"{key}.minimum", f"= {scale.minimum:g} is not a whole number, which DeepSpeed requires; write 1 or more"
    if first < scale.minimum:
        yield f"{key}.initial", f"= {first:g} is below {key}.minimum = {scale.minimum:g}; raise it"
    if first > scale.largest_scale:
        yield f"{key}.initial", f"= {first:g} is above {key}.maximum = {scale.largest_scale:g}; lower it"
    if scale.escalate_after > scale.escalate_within:
        problem = f"is more than {key}.escalate_within = {scale.escalate_within} steps; make it smaller"
        yield f"{key}.escalate_after", f"= {scale.escalate_after} {problem}"


def _tracking(config: Config) -> Iterator[Problem]:
    endpoint = config.tracking.otlp_endpoint
    if endpoint is not None and WITH_PASSWORD.search(endpoint):
        yield "tracking.otlp_endpoint", "holds a password; take it out and set OTEL_EXPORTER_OTLP_HEADERS"
    elif endpoint is not None and not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", endpoint):
        yield "tracking.otlp_endpoint", f"= '{endpoint}' is not an address; write it as http://localhost:4318"
    profile = config.profile
    if profile.steps and 0 < config.run.steps < profile.start:
        yield "profile.start", f"= {profile.start} is after the last step, run.steps = {config.run.steps}"


def _guard(config: Config) -> Iterator[Problem]:
    guard, plan = config.guard, config.guard.reactions
    repeated = next((item for index, item in enumerate(plan) if item in plan[:index]), None)
    if repeated is not None:
        fix = f"name it once and set guard.{repeated}_budget" if repeated != "abort" else "name it once"
        yield "guard.reactions", f"names {repeated} twice; {fix}"
    elif "abort" in plan[:-1]:
        yield "guard.reactions", f"never reaches {plan[plan.index('abort') + 1]} after abort; move abort to the end"
    low, high = guard.min_update_ratio, guard.max_update_ratio
    if low is not None and high is not None and low >= high:
        yield "guard.min_update_ratio", f"= {low:g} is not below guard.max_update_ratio = {high:g}; make it smaller"
    if guard.spike_sigmas and 0 < config.run.steps <= (guard.spike_window + 1) // 2:
        problem = f"never takes effect in run.steps = {config.run.steps}: checks start after half of it"
        yield "guard.spike_window", f"= {guard.spike_window} {problem}; make it smaller or set guard.spike_sigmas=0"
    known = [*(item.name for item in fields(config.warnings)), "self_check"]
    for index, name in enumerate(guard.warnings):
        if name not in known:
            yield f"guard.warnings[{index}]", f"= '{name}' is not one of {', '.join(known)}; correct or remove it"
    if re.fullmatch(r"never|suspicious|every [1-9]\d*", guard.reexecute) is None:
        fix = "write never, suspicious, or every N with a number of steps, such as 'every 500'"
        yield "guard.reexecute", f"= '{guard.reexecute}' is not one of its values; {fix}"


def _canary(config: Config) -> Iterator[Problem]:
    known = [field.name for field in dataclasses.fields(ParitySection)]
    for name in config.canary.bounds:
        if name not in known:
            yield f"canary.bounds.{name}", f"is no key of parity:, which has {', '.join(known)}"
    steps, share = config.canary.steps, config.canary.data_share
    if steps is not None and share is not None:
        yield "canary.data_share", f"= {share:g} sets the canary's length, as canary.steps = {steps} does; remove one"


_IN_A_MODULE = ("inf_gradient", "nan_gradient", "nan_activation", "gradient_spike", "flipped_bit")
_FAULTS_READ = {
    "module": _IN_A_MODULE,
    "rank": (*_IN_A_MODULE, "nan_loss", "loss_spike"),
    **dict.fromkeys(("place", "bit", "persists"), ("flipped_bit",)),
    "factor": ("loss_spike", "gradient_spike"),
}
"""Fault keys to the kinds that read them."""


def _faults(config: Config) -> Iterator[Problem]:
    for index, fault in enumerate(config.faults):
        key = f"faults[{index}]"
        if 0 < config.run.steps < fault.step:
            yield f"{key}.step", f"= {fault.step} is after the last step, run.steps = {config.run.steps}; lower it"
        for name, kinds in _FAULTS_READ.items():
            value = getattr(fault, name)
            if fault.kind not in kinds and value != getattr(type(fault), name):
                yield f"{key}.{name}", f"= {scalar(value)} is not read by kind: {fault.kind}; remove it"
