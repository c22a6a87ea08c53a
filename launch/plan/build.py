"""The model of a run config on torch's meta device, where tensors have shapes and no memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

from config.errors import UserError
from config.schema import Config
from config.task import ENCODER_TASKS, model_class_of
from data.text.tokenizer import ENCODER_TOKENS, SMALLEST_BPE, is_made, vocabulary_size
from modeling.build import empty_model, model_config
from training.tasks.shape import given_by_task

_UNKNOWN_LABELS = ("0", "1")
"""Labels of a classifier that finds them in the data. One label more is one row more of its last layer."""
_TOKENIZER = SimpleNamespace(eos_token_id=0, pad_token_id=0, cls_token_id=1, sep_token_id=2)
"""Special tokens of a model that is not made yet. Their ids change no size."""


def model_of(config: Config) -> Any:
    """The model to train, without its adapter. Raises UserError when its config is refused or cannot be read."""
    if config.task == "classify" and not config.classify.labels:
        config = replace(config, classify=replace(config.classify, labels=_UNKNOWN_LABELS))
    section, model_class = config.model, model_class_of(config)
    if section.attention != "eager":  # all fused attention is counted alike, whether its kernel is installed or not
        section = replace(section, attention="auto")
    shape = model_config(
        section,
        vocab_size=_vocabulary(config) if section.name_or_path is None else 0,
        sequence_length=config.data.longest,
        model_class=model_class,
        given=given_by_task(config, _TOKENIZER),
    )
    return empty_model(section, shape, model_class=model_class)


def _vocabulary(config: Config) -> int:
    """[tokens] Size of the vocabulary; a Hugging Face tokenizer is loaded, from the hub if need be.

    Raises UserError: it cannot be loaded.
    """
    name = config.data.tokenizer
    if "vocab_size" in config.model.config:
        return int(config.model.config["vocab_size"])
    if is_made(name):
        own = SMALLEST_BPE if name == "bytes" else int(name.removeprefix("bpe:"))
        # beside its own tokens an encoder's tokenizer has some, and an encoder-decoder's one to pad with
        return own + (len(ENCODER_TOKENS) if config.task in ENCODER_TASKS else config.task == "seq2seq")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(Path(name).expanduser()), trust_remote_code=False)
        return vocabulary_size(tokenizer)
    except Exception as error:  # the hub, a gated repository or a file may raise anything
        raise UserError(
            f"data.tokenizer = {name}: cannot be loaded here to count its tokens; "
            f"add model.config.vocab_size=N to the command line ({type(error).__name__})"
        ) from error
