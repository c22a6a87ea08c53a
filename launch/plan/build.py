"""The model of a run config on torch's meta device, where tensors have shapes and no memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from config.errors import UserError
from config.schema import Config
from config.task import ENCODER_TASKS
from data.text.tokenizer import ENCODER_TOKENS, SMALLEST_BPE, is_made, vocabulary_size
from training.tasks.shape import empty_model_of


def model_of(config: Config) -> Any:
    """The model to train, without its adapter. Raises UserError when its config is refused or cannot be read."""
    return empty_model_of(config, _vocabulary(config) if config.model.name_or_path is None else 0)


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
