"""The Hugging Face config of a run's model, with what its task and its data decide, and other settings they decide."""

import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from transformers import PretrainedConfig

from config import rules
from config.errors import UserError
from config.schema import Config
from config.task import ENCODER_TASKS, model_class_of
from data.corpora.corpus import Corpus, labels_of
from data.corpora.documents import Documents
from data.text.tokenizer import load_tokenizer
from modeling.build import empty_model, model_config, require_shares

_DECIDE = (*ENCODER_TASKS, "seq2seq")
"""Tasks that decide part of the model's config (`given_by_task`)."""
_UNKNOWN_LABELS = ("0", "1")
"""Placeholder for labels that are found in the data; each adds one row to the last layer."""
_TOKENIZER = SimpleNamespace(eos_token_id=0, pad_token_id=0, cls_token_id=1, sep_token_id=2)
"""Placeholder for a tokenizer that is not loaded yet; their ids change no size but that of RoBERTa's positions."""
_LARGE_VOCABULARY = 1 << 18


def settle_labels(config: Config, corpus: Corpus) -> Config:
    """`config` with classify.labels filled in from the data. Raises UserError if they lack a label of the data."""
    if config.task != "classify" or config.classify.kind == "regression":
        return config
    labels = labels_of(corpus, config.classify.labels, config.data)
    return replace(config, classify=replace(config.classify, labels=labels))


def settle_steps(config: Config, corpus: Corpus) -> Config:
    """`config` with run.steps computed from run.epochs and the number of training samples, rounded up. An epoch of a
    mixture has each source's samples `epochs` times, or once if it is weighted. Raises UserError if run.steps is set to
    another number, or breaks a rule of the config."""
    run, sources = config.run, config.data.sources
    if run.epochs is None:
        return config
    samples = Fraction(corpus.train.sequences(config.data.sequence_length))
    if corpus.mixture is not None:
        pairs = zip(corpus.mixture.samples, sources, strict=True)
        samples = sum(((size * Fraction(str(source.epochs or 1))) for size, source in pairs), Fraction())
    size = config.batch.global_size // config.group_size
    steps = max(1, math.ceil(Fraction(str(run.epochs)) * samples / size) * config.grpo.updates)
    said = f"run.epochs = {run.epochs:g} is {steps:,} steps, of {float(samples):,.10g} samples an epoch"
    if run.steps not in (0, steps):
        raise UserError(f"run.steps = {run.steps}: {said} in batches of {size}; give one of the two")
    config = replace(config, run=replace(run, steps=steps))
    rules.check(config, lambda key: said)
    return config


def settle_orthogonalization(config: Config, *, on_gpu: bool) -> Config:
    """`config` with optimizer.orthogonalization = auto resolved. on_gpu: whether the run computes in 16 bits on a
    GPU."""
    section = config.optimizer
    if section.name != "muon" or section.orthogonalization != "auto":
        return config
    return replace(config, optimizer=replace(section, orthogonalization="bf16" if on_gpu else "fp32"))


def shape_of_model(config: Config, corpus: Corpus) -> PretrainedConfig:
    """The config of the model to train. config: after `settle_labels`. Raises UserError like `model_config`."""
    shape = model_config(
        config.model,
        vocab_size=corpus.vocab_size,
        sequence_length=config.data.longest,
        model_class=model_class_of(config),
        given=given_by_task(config, load_tokenizer(corpus.tokenizer_folder)) if config.task in _DECIDE else None,
    )
    if shape.get_text_config().vocab_size < corpus.vocab_size:
        _require_embeddings(config, corpus, shape.get_text_config().vocab_size)
    return shape


def _require_embeddings(config: Config, corpus: Corpus, rows: int) -> None:
    """Raises UserError if batches may hold a token that a saved model lacks. Its tokenizer may know tokens that it
    lacks: that of Gemma 3 has one for images, which the models of text have no embedding of. rows: of the embedding."""
    tokenizer: Any = load_tokenizer(corpus.tokenizer_folder)
    largest = max(corpus.train.largest_id, corpus.validation.largest_id)
    if config.task == "mlm":  # hidden tokens are replaced by any other
        largest = corpus.vocab_size - 1
    elif config.task in _DECIDE:
        largest = max(largest, tokenizer.pad_token_id or 0)
    if largest >= rows:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise UserError(
            f"model.name_or_path = {config.model.name_or_path}: has no embedding of the token {token!r} (id {largest}) "
            f"of data.tokenizer = {config.data.tokenizer}; set data.tokenizer=model, or take it out of the data"
        )


def empty_model_of(config: Config, vocabulary: int) -> Any:
    """The model to train, on the meta device and without adapter. vocabulary: number of tokens. Raises UserError."""
    if config.task == "classify" and not config.classify.labels:
        config = replace(config, classify=replace(config.classify, labels=_UNKNOWN_LABELS))
    section, model_class = config.model, model_class_of(config)
    if section.attention != "eager":  # all fused attention is alike in sizes, whether its kernel is installed or not
        section = replace(section, attention="auto")
    shape = model_config(
        section,
        vocab_size=vocabulary,
        sequence_length=config.data.longest,
        model_class=model_class,
        given=given_by_task(config, _TOKENIZER),
    )
    require_shares(shape.get_text_config())
    return empty_model(section, shape, model_class=model_class)


def require_model(config: Config) -> None:
    """Raise UserError if the model cannot be built, before the data are prepared."""
    section = config.model
    if section.name_or_path is None:
        empty_model_of(config, 0 if "vocab_size" in section.config else _LARGE_VOCABULARY)
    elif section.config and not section.trust_remote_code:
        empty_model_of(config, 0)


def given_by_task(config: Config, tokenizer: Any) -> dict[str, Any]:
    """Arguments of the model's config that the task decides. config: after `settle_labels`."""
    given: dict[str, Any] = {}
    if config.model.name_or_path is None and config.task == "seq2seq":
        end = tokenizer.eos_token_id
        pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        given = {"eos_token_id": end, "pad_token_id": pad, "decoder_start_token_id": pad}  # as T5 starts
    elif config.model.name_or_path is None and config.task in ENCODER_TASKS:
        given = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "pad")}
    if config.task == "classify":
        given["pad_token_id"] = tokenizer.pad_token_id  # models of text read the class at the last other token
        regression = config.classify.kind == "regression"
        names = ["number"] if regression else list(config.classify.labels)
        given["id2label"] = dict(enumerate(names))
        given["label2id"] = {name: number for number, name in enumerate(names)}
        given["problem_type"] = "regression" if regression else "single_label_classification"
    return given


def documents_of(config: Config, corpus: Corpus) -> Documents | None:
    """How a run's batches keep documents apart; None if they do not."""
    one_row = config.model.attention.startswith("flash_attention")  # its kernels take documents of any length
    return Documents(corpus.end_of_document, one_row=one_row) if config.keeps_documents_apart else None
