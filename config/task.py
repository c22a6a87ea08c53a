"""Settings left open in the run config that follow from the task and from data.path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath
from typing import Any, TypeVar

from config.schema import SAMPLING_TASKS, UNPACKED_TASKS, Config, DataSection, ValidationSection

T = TypeVar("T", bound=ValidationSection)

CAUSAL_LM = "AutoModelForCausalLM"
MASKED_LM = "AutoModelForMaskedLM"
SEQ2SEQ_LM = "AutoModelForSeq2SeqLM"
SEQUENCE_CLASSIFICATION = "AutoModelForSequenceClassification"
TOKEN_CLASSIFICATION = "AutoModelForTokenClassification"
MODEL_CLASSES = {
    **dict.fromkeys(("pretrain", "sft", "dpo", *SAMPLING_TASKS, "distill"), CAUSAL_LM),
    "seq2seq": SEQ2SEQ_LM,
    "classify": SEQUENCE_CLASSIFICATION,
    "mlm": MASKED_LM,
}
"""Transformers class that builds a task's model; see `model_class_of`."""
KINDS = {
    CAUSAL_LM: "causal language model",
    MASKED_LM: "masked language model",
    SEQ2SEQ_LM: "sequence-to-sequence model",
    SEQUENCE_CLASSIFICATION: "sequence classifier",
    TOKEN_CLASSIFICATION: "token classifier",
}
"""Human-readable names of the classes."""

ALGORITHMS: dict[str, tuple[str, str, str, str, float, float]] = {
    "grpo": ("group_std", "sequence", "token", "clip", 0.2, 0.2),
    "dapo": ("group_std", "token", "token", "clip", 0.2, 0.28),
    "dr_grpo": ("group_mean", "constant", "token", "clip", 0.2, 0.2),
    "rloo": ("rloo", "constant", "token", "clip", 0.2, 0.2),
    "gspo": ("group_std", "sequence", "sequence", "clip", 3e-4, 4e-4),
    "cispo": ("group_std", "token", "token", "cispo", 0.0, 5.0),
}
"""grpo.algorithm to the values of the keys it decides, in the order of `DECIDED`."""
DECIDED = ("advantage", "loss", "ratio", "surrogate", "clip_low", "clip_high")

CHUNKED_TASKS = ("pretrain", "sft", "seq2seq", "mlm")
"""Tasks whose loss, the cross-entropy of every label, may be computed in chunks of the logits."""
ENCODER_TASKS = ("classify", "mlm")
"""Tasks whose models see a whole text at once and do not generate."""
ROW_FORMATS = {"sequence": "labelled", "token": "tagged", "regression": "scored"}
"""data.format of each classify.kind."""

OWN = "held out"
"""Name of the validation set held out of the only source, if there are other sets."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""Compression of text by file suffix."""
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_SUFFIXES = {**dict.fromkeys(JSON_SUFFIXES, "jsonl"), ".parquet": "parquet", ".idx": "megatron", ".txt": "text"}


def model_class_of(config: Config) -> str:
    """Transformers class that builds the model of a config."""
    by_token = config.task == "classify" and config.classify.kind == "token"
    return TOKEN_CLASSIFICATION if by_token else MODEL_CLASSES[config.task]


def loss_unit(config: Config) -> str:
    """Unit of the loss of a config's task; empty if it has none, such as a weighted sum of several losses."""
    if config.task == "classify":
        units = {"sequence": "nats per row", "token": "nats per label", "regression": "mean squared error"}
        return units[config.classify.kind]
    if config.task in ("dpo", *SAMPLING_TASKS, "distill"):
        return ""
    by_row = config.task == "sft" and config.sft.loss == "row"
    return "nats per token, mean over rows" if by_row else "nats per token"


def settle_task(config: Config) -> Config:
    """`config` with data.source = auto, evaluate.batches = auto and the like resolved, as far as possible."""
    data = config.data
    if data.format != "auto":
        data = _of_format(data, data.format)
        config = replace(config, data=data)
    if config.task == "dpo":
        if config.preference.reference == "auto":
            reference: Any = "precomputed" if config.adapter.kind == "none" else "adapter_off"
            config = replace(config, preference=replace(config.preference, reference=reference))
        data = _of_format(data, "preference")
    if config.task == "grpo":
        chosen = zip(DECIDED, ALGORITHMS[config.grpo.algorithm], strict=True)
        given: Any = {key: value for key, value in chosen if getattr(config.grpo, key) is None}
        config = replace(config, grpo=replace(config.grpo, **given))
    if config.task in SAMPLING_TASKS:
        data = replace(data, target_length=data.target_length or config.grpo.max_new_tokens)
    if config.task == "seq2seq":
        data = replace(data, target_length=data.label_length)
    if config.learns_rows and data.packing == "auto":
        data = replace(data, packing="none" if config.task in UNPACKED_TASKS else "best_fit")
    if config.task == "classify":
        data = _of_format(data, ROW_FORMATS[config.classify.kind])
    sources, sets = _named(data.sources, "source"), _named(data.validation, "validation")
    data = replace(data, source=_decided(data.source, data.path), sources=sources, validation=sets)
    if data.tokenizer == "model" and config.model.name_or_path is not None:
        data = replace(data, tokenizer=config.model.name_or_path)
    evaluate = config.evaluate
    if evaluate.batches == "auto":
        evaluate = replace(evaluate, batches=None if config.task == "classify" else 8)
    return replace(config, data=data, evaluate=evaluate)


def _of_format(data: DataSection, format: str) -> DataSection:
    """The section with `format` filled in for rows, sources and sets that name none."""

    def formatted(section: Any) -> Any:
        return replace(section, format=format) if section.format == "auto" else section

    sources, sets = tuple(map(formatted, data.sources)), tuple(map(formatted, data.validation))
    return formatted(replace(data, sources=sources, validation=sets))


def _named(items: tuple[T, ...], what: str) -> tuple[T, ...]:
    """Sources or sets, each with its name and source kind filled in."""
    return tuple(
        replace(item, name=item.name or f"{what} {number}", source=_decided(item.source, item.path))
        for number, item in enumerate(items, 1)
    )


def is_url(path: str) -> bool:
    """Whether a data.path is read through fsspec rather than from disk, such as s3://bucket/folder."""
    return "://" in path


def _decided(source: str, path: str | None) -> Any:
    if source != "auto":
        return source
    if path is None:
        return "stdlib"
    return source_of(path)


def source_of(path: str) -> Any:
    """The data.source that a file's suffixes imply; hub without a known suffix."""
    name = path.partition("?")[0] if is_url(path) else path
    suffixes = [suffix for suffix in PurePath(name).suffixes if suffix not in COMPRESSIONS]
    return _SUFFIXES.get(suffixes[-1] if suffixes else "", "hub")
