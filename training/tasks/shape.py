"""The Hugging Face config of a run's model: what its task and its data decide of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from config.schema import Config
from config.task import ENCODER_TASKS, model_class_of
from data.corpus import Corpus
from data.prepare_labelled import labels_of
from data.tokenizer import load_tokenizer
from modeling.build import model_config


def settle_labels(config: Config, corpus: Corpus) -> Config:
    """`config` with classify.labels decided. Raises UserError where they lack a label of the data."""
    if config.task != "classify" or config.classify.kind == "regression":
        return config
    labels = labels_of(corpus, config.classify.labels)
    return replace(config, classify=replace(config.classify, labels=labels))


def shape_of_model(config: Config, corpus: Corpus) -> PretrainedConfig:
    """The config of the model to train. config: with its labels. Raises UserError as `model_config`."""
    return model_config(
        config.model,
        vocab_size=corpus.vocab_size,
        sequence_length=config.data.sequence_length,
        model_class=model_class_of(config),
        given=given_by_task(config, load_tokenizer(corpus.tokenizer_folder)) if config.task in ENCODER_TASKS else None,
    )


def given_by_task(config: Config, tokenizer: Any) -> dict[str, Any]:
    """Arguments of the model's config that the task decides. config: with its labels."""
    if config.task not in ENCODER_TASKS:
        return {}
    given: dict[str, Any] = {}
    if config.model.name_or_path is None:
        given |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "pad")}
    if config.task == "classify":
        regression = config.classify.kind == "regression"
        names = ["number"] if regression else list(config.classify.labels)
        given["id2label"] = dict(enumerate(names))
        given["label2id"] = {name: number for number, name in enumerate(names)}
        given["problem_type"] = "regression" if regression else "single_label_classification"
    return given
