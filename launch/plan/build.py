"""The model of a run config on torch's meta device, where tensors have shapes and no memory.

It is built by transformers, accelerate and peft. So the parameters of every architecture and adapter are counted and
not computed by a formula that may lag behind these libraries.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from config.adapter import peft_arguments, refused_targets, require_modules, trained_whole
from config.errors import UserError, one_line
from config.schema import AdapterSection, Config
from config.task import CAUSAL_LM, ENCODER_TASKS, KINDS

_BYTES_VOCABULARY = 257  # data.tokenizer = bytes: 256 bytes and the end of a document
_FURTHER_TOKENS = {**dict.fromkeys(ENCODER_TASKS, 4), "seq2seq": 1}
"""[tokens] That a bytes or bpe tokenizer has besides: an encoder's where a text begins and ends, padding, the mask; an
encoder-decoder's padding."""
_UNKNOWN_LABELS = 2
"""[labels] Of a classifier whose labels are found in the data. A label more is a row more of its last layer."""


def new_model(
    hugging_face: Any, *, model_class: str = CAUSAL_LM, eager: bool = False, trust_remote_code: bool = False
) -> Any:
    """The model of a Hugging Face config, on the meta device. model_class: of config/task.py. eager: its attention.

    Raises UserError when it cannot be built.
    """
    import transformers
    from accelerate import init_empty_weights

    options: dict[str, Any] = {"attn_implementation": "eager"} if eager else {}
    try:
        with init_empty_weights(include_buffers=False):
            auto = getattr(transformers, model_class)
            model = auto.from_config(hugging_face, trust_remote_code=trust_remote_code, **options)
        model.tie_weights()
    except (ImportError, ValueError, OSError) as error:
        problem = f"cannot be built as a {KINDS[model_class]}: {one_line(error)}"
        raise UserError(f"model.architecture = {hugging_face.model_type}: {problem}") from error
    return model


def adapted(model: Any, section: AdapterSection, *, model_class: str = CAUSAL_LM) -> Any:
    """The same model with the adapter in it and its own weights frozen, as the trainer has it.

    What the base's files lack beside a classifier's head is not known here. Raises UserError for modules that it does
    not have.
    """
    from accelerate import init_empty_weights
    from peft import LoraConfig, get_peft_model

    require_modules(section, (name for name, _ in model.named_modules()))
    whole = trained_whole(section, model, model_class=model_class)
    arguments = peft_arguments(section, model_class=model_class, whole=whole)
    try:
        with init_empty_weights(include_buffers=False), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what peft calls
            found = get_peft_model(model, LoraConfig(**arguments), autocast_adapter_dtype=False)
    except (ValueError, TypeError) as error:
        raise refused_targets(section, error) from error
    return found.get_base_model()


def hugging_face_config(config: Config) -> Any:
    """The Hugging Face config of the model to train. Raises UserError when it is refused or cannot be read."""
    from transformers import AutoConfig

    model, of_task = config.model, _given_by_task(config)
    try:
        if model.name_or_path is not None:
            found = saved_config(model.name_or_path, trust_remote_code=model.trust_remote_code)
            found.update({**of_task, **model.config})
        else:
            tokens = _FURTHER_TOKENS.get(config.task, 0) if _is_made(config.data.tokenizer) else 0
            size = model.config.get("vocab_size") or vocabulary_size(config.data.tokenizer) + tokens
            given = {"vocab_size": size, **of_task}
            defaults = AutoConfig.for_model(str(model.architecture))
            if hasattr(defaults, "max_position_embeddings"):
                given["max_position_embeddings"] = config.data.longest
            found = AutoConfig.for_model(str(model.architecture), **{**given, **model.config})
    except (OSError, ValueError, TypeError, ZeroDivisionError) as error:
        source = model.name_or_path or model.architecture
        raise UserError(f"model {source}: its config cannot be read: {one_line(error)}") from error
    found.use_cache = False
    return found


def saved_config(name: str, *, trust_remote_code: bool) -> Any:
    """The config of a folder or a hub id. Raises OSError or ValueError as transformers does."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(Path(name).expanduser()), trust_remote_code=trust_remote_code)


def _given_by_task(config: Config) -> dict[str, Any]:
    """What an encoder's task decides of its config. The numbers of its tokens are not known, and change no size."""
    if config.task not in ENCODER_TASKS:
        return {}
    given: dict[str, Any] = {}
    if config.model.name_or_path is None:
        given |= {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": None, "eos_token_id": None}
    if config.task == "classify":
        labels = 1 if config.classify.kind == "regression" else len(config.classify.labels) or _UNKNOWN_LABELS
        given["num_labels"] = labels
    return given


def _is_made(tokenizer: str) -> bool:
    """Whether the tokenizer is made by the trainer."""
    return tokenizer == "bytes" or tokenizer.startswith("bpe:")


def vocabulary_size(tokenizer: str) -> int:
    """[tokens] Vocabulary size of data.tokenizer; a Hugging Face tokenizer is loaded, from the hub if need be.

    Raises UserError: it cannot be loaded.
    """
    if tokenizer == "bytes":
        return _BYTES_VOCABULARY
    trained = re.fullmatch(r"bpe:(\d+)", tokenizer)
    if trained:
        return int(trained[1])
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(str(Path(tokenizer).expanduser()), trust_remote_code=False)
    except Exception as error:  # the hub, a gated repository or a file may raise anything
        raise UserError(
            f"data.tokenizer = {tokenizer}: cannot be loaded here to count its tokens; "
            f"add model.config.vocab_size=N to the command line ({type(error).__name__})"
        ) from error
    return max(len(found), max(found.get_vocab().values()) + 1)
