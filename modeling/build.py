"""Build a Hugging Face language model or classifier: from a config with reproducible weights, or from saved weights.

The weights of a model trained from scratch depend on the seed and the module's name only. Every module draws from its
own generator, in FP32, and only the engine, which keeps masters, rounds. So ZeRO 0, 1, 2 and 3, any number of ranks,
and FP32 and 16-bit runs all start from the same masters and are comparable.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from unittest.mock import patch

import torch
import transformers
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch.nn.attention.flex_attention import flex_attention
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.hub import get_checkpoint_shard_files

from config import json_text
from config.errors import UserError, meant, one_line
from config.files import file_sha256
from config.load import show
from config.printable import first_of
from config.rules import QUANTISED_BASES
from config.schema import AdapterSection, ModelSection
from config.task import CAUSAL_LM, KINDS, SEQ2SEQ_LM
from modeling.expert_parallel import EXPERT_COUNTS, expert_count, used_by_token
from modeling.quantised_base import freeze_quantised, loading_options, quantised_parameters
from modeling.tensor_parallel import cut

Gather = Callable[[Sequence[torch.nn.Parameter]], AbstractContextManager[bool]]
"""Makes a context in which full parameters are writable; it yields whether this rank must write them."""


def no_gather(parameters: Sequence[torch.nn.Parameter]) -> AbstractContextManager[bool]:
    """A Gather for parameters that every rank holds in full."""
    return nullcontext(True)


_SIZE = re.compile(r"(?:num|n)_\w+|d_model|\w*(?:size|dim|layers?|heads?)")
"""Names of sizes and counts in architectures' configs."""
_NEEDED = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "head_dim", "vocab_size"),
    *EXPERT_COUNTS,
)
_AFTER_PADDING = frozenset(
    {
        *("camembert", "data2vec-text", "esm", "ibert", "lilt", "longformer", "luke", "mpnet", "roberta"),
        *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    }
)
"""Architectures whose first position is the padding token's id plus one."""
_IN_A_BLOCK = re.compile(r"\.\d+\.")
"""Found in the names of a block's parameters, such as model.layers.1.mlp.up_proj.weight."""


def model_config(
    section: ModelSection,
    *,
    vocab_size: int,
    sequence_length: int,
    model_class: str = CAUSAL_LM,
    given: Mapping[str, Any] | None = None,
) -> PretrainedConfig:
    """The Hugging Face config of the model to train. given: arguments set by the task. Raises UserError."""
    if section.name_or_path is not None:
        config = _saved_config(section, model_class)
        config.update(dict(given or {}))
        _require_class(section, config, model_class)
    else:
        config = _new_config(section, model_class, {"vocab_size": vocab_size, **(given or {})}, sequence_length)
    text = config.get_text_config()
    if section.name_or_path is None and text.vocab_size < vocab_size:
        raise UserError(
            f"model vocab_size = {text.vocab_size}: smaller than the tokenizer's {vocab_size} tokens; "
            f"raise model.config.vocab_size or choose a smaller data.tokenizer"
        )
    context = getattr(text, "max_position_embeddings", None)
    before = positions_before(text.model_type, getattr(text, "pad_token_id", None))
    if context is not None and context - before < sequence_length:
        raise UserError(
            f"data.sequence_length = {sequence_length}: longer than the model's max_position_embeddings = {context}"
            f"{f', {before} of which stand before the text' if before else ''}; "
            f"shorten the sequences or raise model.config.max_position_embeddings"
        )
    if model_class == SEQ2SEQ_LM:
        _require_decoder_start(section, config)
    if model_class == CAUSAL_LM:
        _require_causal(section, config)
    config.use_cache = False
    return config


def positions_before(architecture: str, pad: int | None) -> int:
    """The number of positions that a model of RoBERTa's kind never gives to text: it counts on from its padding id."""
    return 0 if pad is None or architecture not in _AFTER_PADDING else pad + 1


def layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """The config of each layer where they differ, as in Gemma 4, whose own config then raises for what differs; else
    the one of all layers."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def attention_sizes(config: PretrainedConfig) -> tuple[tuple[int, int, int], ...]:
    """(heads of queries, heads of keys, head size) by `layer_configs`."""
    found = []
    for layer in layer_configs(config):
        heads = layer.num_attention_heads
        keys, size = (getattr(layer, name, None) for name in ("num_key_value_heads", "head_dim"))
        found.append((heads, keys or heads, size or layer.hidden_size // heads))
    return tuple(found)


def require_shares(config: PretrainedConfig) -> None:
    """Raises UserError for counts of heads or experts that do not fit together and would fail in the forward pass."""
    for layer in layer_configs(config):
        heads, groups = (getattr(layer, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
        latent = getattr(layer, "kv_lora_rank", None)  # keys of multi-head latent attention are not shared
        if isinstance(heads, int) and isinstance(groups, int) and not latent and (groups < 1 or heads % groups):
            both = f"num_key_value_heads = {groups}: does not divide model.config.num_attention_heads = {heads}"
            raise UserError(f"model.config.{both}; change one of them")
    experts = expert_count(config)
    used = getattr(config, "num_experts_per_tok", None)
    if experts and isinstance(used, int) and not 0 < used <= experts:
        raise UserError(f"model.config.num_experts_per_tok = {used}: there are {experts} experts; give 1 to {experts}")


def dropout_keys(config: PretrainedConfig) -> list[str]:
    """The keys of an architecture's config that are a dropout probability above 0."""
    values: dict[str, Any] = config.to_dict()
    named = ((key, value) for key, value in values.items() if is_dropout(key))
    return [key for key, value in named if isinstance(value, float) and math.isfinite(value) and value > 0]


def is_dropout(key: str) -> bool:
    return "dropout" in key or key.endswith("pdrop")


def without_dropout(config: PretrainedConfig, *, kept: Mapping[str, Any]) -> list[str]:
    """Set the config's dropout probabilities to 0, except those that the user set; returns the changed keys."""
    changed = [key for key in dropout_keys(config) if key not in kept]
    for key in changed:
        setattr(config, key, 0.0)
    return changed


def build_model(
    section: ModelSection,
    config: PretrainedConfig,
    *,
    seed: int,
    gather: Gather = no_gather,
    model_class: str = CAUSAL_LM,
    adapter: AdapterSection | None = None,
    drawn: bool = True,
) -> PreTrainedModel:
    """The model in FP32; under ZeRO-3 each rank holds only its partition. Raises UserError.

    Under ZeRO-3 the caller keeps an HfDeepSpeedConfig of FP32 alive; transformers then constructs and loads the model
    inside `deepspeed.zero.Init`. `gather` gives access to full parameters while the weights are drawn. model_class:
    from config/task.py. adapter: its base may be in 4 or 8 bits. drawn: False: a new model's trained weights are 0.
    """
    auto, options = getattr(transformers, model_class), _options(section)
    if section.attention == "flex_attention" and not torch.accelerator.is_available():
        _require_flex_attention_on_cpu()
    with _refused(section):
        if section.name_or_path is not None:
            if adapter is None or adapter.base == "compute":
                return _loaded(auto, section, config, options, seed=seed, gather=gather)
            options |= loading_options(adapter, auto, config, options)
            model = _loaded(auto, section, config, options, seed=seed, gather=gather)
            freeze_quantised(model)
            return model
        with no_init_weights():
            model = auto.from_config(config, dtype=torch.float32, **options)
    draw_weights(model, seed=seed, gather=gather, only=None if drawn else _zeroed(model))
    return model


def empty_model(section: ModelSection, config: PretrainedConfig, *, model_class: str = CAUSAL_LM) -> PreTrainedModel:
    """The model of `build_model` with parameters on the meta device, which take no memory. Raises UserError."""
    with _refused(section), init_empty_weights(include_buffers=False):
        try:
            model: PreTrainedModel = getattr(transformers, model_class).from_config(config, **_options(section))
        except Exception as error:  # wrong sizes make constructors raise anything, such as a KeyError
            if not section.config or isinstance(error, ImportError):
                raise
            raise _wrong_shape(section, error, model_class) from error
    model.tie_weights()
    return model


def _wrong_shape(section: ModelSection, error: BaseException, model_class: str) -> UserError:
    """The error for a config that an architecture rejects. It names each key whose removal alone would help."""
    while error.__cause__ is not None:
        error = error.__cause__  # raised inside a check of huggingface_hub
    said = one_line(error).rstrip(".")
    said = said if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {said}"
    make = AutoConfig.for_model if section.name_or_path is None else AutoConfig.from_pretrained
    what, blamed = str(section.architecture or section.name_or_path), []
    for key in section.config:
        kept = {other: value for other, value in section.config.items() if other != key}
        with suppress(Exception), init_empty_weights(include_buffers=False):
            getattr(transformers, model_class).from_config(make(what, **kept), **_options(section))
            blamed.append(key)
    values = ", ".join(f"model.config.{key} = {show(section.config[key])}" for key in blamed or section.config)
    return UserError(
        f"{values}: no {what} can be built with {'it' if len(blamed) == 1 else 'these'} ({said}); change it"
    )


def _options(section: ModelSection) -> dict[str, Any]:
    """Arguments of transformers' constructors."""
    # transformers chooses sdpa if the model supports it, else eager
    chosen = {} if section.attention == "auto" else {"attn_implementation": section.attention}
    return {"trust_remote_code": section.trust_remote_code, **chosen}


@contextmanager
def _refused(section: ModelSection) -> Iterator[None]:
    """Context manager that turns transformers' errors into a UserError."""
    try:
        yield
    except (ImportError, ValueError, OSError, SafetensorError, UnpicklingError) as error:
        raise UserError(
            f"model cannot be built (model.name_or_path = {section.name_or_path}, model.architecture = "
            f"{section.architecture}, model.attention = {section.attention}): {one_line(error)}"
        ) from error


def _loaded(
    auto: Any, section: ModelSection, config: PretrainedConfig, options: dict[str, Any], *, seed: int, gather: Gather
) -> PreTrainedModel:
    """The saved model; modules missing in the files, such as a new task's head, are initialised as in a new model."""
    # for a different number of labels transformers initialises a new head from each rank's own generator
    options = {**options, "dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with _tying_by_value(gather), _without_report():
        model, found = auto.from_pretrained(section.name_or_path, config=config, **options)
    model.not_read = sorted(found["unexpected_keys"])
    lacking = {*found["missing_keys"], *(key[0] for key in found["mismatched_keys"])}
    heads = auto in (transformers.AutoModelForSequenceClassification, transformers.AutoModelForTokenClassification)
    base = f"{model.base_model_prefix}."
    wrong = [key[0] for key in found["mismatched_keys"] if key[0].startswith(base) or not heads]
    if wrong:
        raise ValueError(f"{wrong[0]} has another shape in the files")
    # as in draw_weights; the configs of T5 1.1, Flan-T5 and mT5 wrongly say that the head is tied
    model.tie_weights(recompute_mapping=False)
    names: dict[torch.nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, set()).add(name)
    wanted = {parameter: min(all_of) for parameter, all_of in names.items() if all_of <= lacking}
    cut = sorted(name for name in wanted.values() if name.startswith(base) and _IN_A_BLOCK.search(name))
    if cut:
        raise ValueError(f"its files lack {cut[0]}, which must be loaded; get all of them")
    if wanted:
        draw_weights(model, seed=seed, gather=gather, only=wanted.keys())
        model.drawn = sorted(wanted.values())
    return model


@contextmanager
def _without_report() -> Iterator[None]:
    """Context manager that hides transformers' table of missing and unexpected tensors; `drawn_notes` names them."""
    logger = logging.getLogger("transformers.modeling_utils")

    def keep(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@contextmanager
def _tying_by_value(gather: Gather) -> Iterator[None]:
    """Context manager: transformers compares full weights when it decides whether two weights in the files are tied. It
    leaves them untied if they differ; under ZeRO-3 it would compare empty placeholders, which are always equal."""
    original = PreTrainedModel.tie_weights

    def tie_weights(self: Any, missing_keys: set[str] | None = None, recompute_mapping: bool = True) -> None:
        pairs = self.all_tied_weights_keys.items() if missing_keys is not None else ()
        names = {name for pair in pairs for name in pair}
        known = dict(self.named_parameters(remove_duplicate=False))
        with gather(list({id(known[name]): known[name] for name in names if name in known}.values())):
            original(self, missing_keys, recompute_mapping)

    with patch.object(PreTrainedModel, "tie_weights", tie_weights):
        yield


def drawn_notes(model: PreTrainedModel) -> list[str]:
    """Human-readable notes on tensors that are missing or unused in a loaded model's files."""
    notes = []
    if lacking := getattr(model, "drawn", []):
        notes.append(f"model.name_or_path has no {', '.join(lacking)}: initialised with run.seed")
    if unread := getattr(model, "not_read", []):
        notes.append(f"model.name_or_path has unused tensors: {first_of(unread, 5)}")
    return notes


def _require_flex_attention_on_cpu() -> None:
    one = torch.zeros(1, 1, 1, 16, requires_grad=True)
    try:
        flex_attention(one, one, one)
    except NotImplementedError as error:
        raise UserError(
            f"model.attention = flex_attention: there is no GPU here, and torch {torch.__version__} says: "
            f"{one_line(error)} Set it to sdpa"
        ) from error


@torch.no_grad()
def draw_weights(
    model: PreTrainedModel, *, seed: int, gather: Gather, only: Collection[torch.nn.Parameter] | None = None
) -> None:
    """Initialise every module as its architecture prescribes, with a generator seeded by (seed, module name). The order
    is transformers' own: children before parents. only: parameters to initialise; others are left unchanged. Every
    rank makes tables that no file has."""
    model.tie_weights(recompute_mapping=False)  # under ZeRO-3 the constructor leaves tied weights apart
    with torch.random.fork_rng(devices=[]):
        for name, module, owner in _bottom_up(model, "", model):
            parameters = list(module.parameters(recurse=False))
            # such as a rotary table, which neither another rank sends nor a checkpoint has
            table = bool(module._non_persistent_buffers_set) and not parameters
            if only is not None and not table and not any(parameter in only for parameter in parameters):
                continue
            kinds: tuple[Any, Any] = type(module), type(owner)
            if _is_named_in_initialisation(*kinds):
                parameters = list(module.parameters())
            else:
                for child in module.children():
                    parameters.extend(child.parameters(recurse=False))
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            # Weights are drawn on the CPU. torch.manual_seed would seed every device type and, where one is missing,
            # queue the call with its stack trace: 2 ms and a longer list with each module.
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
            with gather(parameters) as writes:
                if writes or table:
                    with _in_fp32(parameters, only):
                        _initialise(module, owner)


@cache
def _is_named_in_initialisation(kind: type[Any], owner: type[Any]) -> bool:
    """Whether the initialisation of a model treats modules of this class apart, so that it may write to any parameter
    below one, as to all experts of a Switch Transformer from their layer. Models themselves write to children only."""
    if issubclass(kind, PreTrainedModel):
        return False
    with suppress(OSError, TypeError):  # code without a source
        words = set(re.findall(r"\w+", inspect.getsource(owner._init_weights)))
        own = (base for base in kind.__mro__ if base is not object and not base.__module__.startswith("torch."))
        return any(base.__name__ in words for base in own)
    return False


def _initialise(module: torch.nn.Module, owner: PreTrainedModel) -> None:
    """Initialise a module, or as its constructor would if its model leaves that to it, like the first GPT's."""
    if isinstance(module, Conv1D):
        module.weight.fill_(math.nan)
    owner._init_weights(module)
    if isinstance(module, Conv1D) and bool(module.weight.isnan().any()):
        torch.nn.init.normal_(module.weight, std=0.02)
        torch.nn.init.zeros_(module.bias)


def _zeroed(model: PreTrainedModel) -> set[torch.nn.Parameter]:
    """Set the parameters that are trained to 0, under ZeRO-3 this rank's partitions; those that are not trained."""
    parameters = set(model.parameters())
    trained = {parameter for parameter in parameters if parameter.requires_grad}
    for parameter in trained:
        for name in ("data", "ds_tensor", "ds_secondary_tensor"):
            if (tensor := getattr(parameter, name, None)) is not None:
                tensor.zero_()
    return parameters - trained


def attention_of(model: PreTrainedModel) -> str:
    return str(model.config._attn_implementation)


@contextmanager
def attending_in_fp32(model: PreTrainedModel) -> Iterator[None]:
    """Context manager in which `ModelSection.wide_attention` replaces attention kernels that take only 16 bits."""
    found = (getattr(each, "config", None) for each in model.modules())
    with ExitStack() as stack:
        for config in {id(own): own for own in found if isinstance(own, PretrainedConfig)}.values():  # T5 has copies
            if ModelSection(attention=str(config._attn_implementation)).wide_attention == "auto":
                usual = model.get_correct_attn_implementation(None)
                stack.enter_context(patch.object(config, "_attn_implementation_internal", usual))
        yield


def count_parameters(model: Any, *, trained: bool = False, active: bool = False) -> int:
    """Number of parameters, counting tied ones once and partitioned ones in full. trained: leave out frozen ones.
    active: of experts, count those that a token uses."""
    found, coded = 0, quantised_parameters(model)
    for parameter in model.parameters():
        if trained and not parameter.requires_grad:
            continue
        if id(parameter) in coded:
            found += coded[id(parameter)].whole_shape.numel()
            continue
        shape, how = torch.Size(getattr(parameter, "ds_shape", parameter.shape)), cut(parameter)
        whole = how.whole(shape) if how else shape
        found += used_by_token(whole, model.config) if active else whole.numel()
    return found


def _bottom_up(
    module: torch.nn.Module, name: str, owner: PreTrainedModel
) -> Iterator[tuple[str, torch.nn.Module, PreTrainedModel]]:
    for child_name, child in module.named_children():
        child_owner = child if isinstance(child, PreTrainedModel) else owner
        yield from _bottom_up(child, f"{name}.{child_name}" if name else child_name, child_owner)
    yield name, module, owner


@contextmanager
def _in_fp32(parameters: Sequence[torch.nn.Parameter], only: Collection[torch.nn.Parameter] | None) -> Iterator[None]:
    """Context manager: parameters are FP32 on the CPU; on exit they are restored, keeping writes to those in `only`."""
    originals = [(parameter, parameter.data) for parameter in parameters]
    for parameter, original in originals:
        parameter.data = original.to(device="cpu", dtype=torch.float32, copy=True)
        parameter.__dict__.pop("_is_hf_initialized", None)
    try:
        yield
    finally:
        for parameter, original in originals:
            if only is None or parameter in only:
                original.copy_(parameter.data)
            parameter.data = original


def _saved_config(section: ModelSection, model_class: str) -> PretrainedConfig:
    name = str(section.name_or_path)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=section.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"model.name_or_path = {section.name_or_path}: {one_line(error)}") from error
    refuse_quantised(config, f"model.name_or_path = {section.name_or_path}", QUANTISED_BASES)
    _check_keys(section.config, config, model_class)
    config.update(section.config)
    return config


def _require_class(section: ModelSection, config: PretrainedConfig, model_class: str) -> None:
    """Raises UserError for a model without a class of this kind in transformers."""
    known = type(config) in getattr(transformers, model_class)._model_mapping
    if known or getattr(config, "auto_map", None):
        return
    fix = "name another model"
    if config.is_encoder_decoder and model_class == CAUSAL_LM:
        fix = "it is an encoder-decoder: set task=seq2seq"
    raise UserError(
        f"model.name_or_path = {section.name_or_path}: transformers has no {KINDS[model_class]} of type "
        f"{config.model_type}; {fix}"
    )


def _require_causal(section: ModelSection, config: PretrainedConfig) -> None:
    """Raises UserError for an encoder such as BERT, whose causal model in transformers attends to all tokens."""
    is_encoder = type(config) in transformers.AutoModelForMaskedLM._model_mapping and not config.is_encoder_decoder
    is_encoder = is_encoder or config.model_type == "bert-generation"
    if is_encoder and getattr(config, "is_decoder", None) is False:
        raise UserError(
            f"model {section.name_or_path or section.architecture}: a {config.model_type} attends to tokens it "
            "should predict; set task=mlm or task=classify, or model.config.is_decoder=true to hide later ones"
        )


_BY_LANGUAGE = ("mbart", "m2m_100", "nllb-moe", "plbart", "seamless_m4t", "seamless_m4t_v2")
"""Model types whose targets start with a language token, which rows of data lack."""


def _require_decoder_start(section: ModelSection, config: PretrainedConfig) -> None:
    """Raises UserError for models that cannot be trained on batches of sources and targets."""
    name = section.name_or_path or section.architecture
    if config.model_type in _BY_LANGUAGE:
        raise UserError(
            f"model {name}: targets of {config.model_type} start with a language, which task = seq2seq does not add; "
            "use T5, mT5, BART or Pegasus"
        )
    if getattr(config, "decoder_start_token_id", None) is None:
        raise UserError(
            f"model.config.decoder_start_token_id: is not in the config.json of {name}; set it to the token that its "
            "decoder starts with, which for T5 is its pad_token_id"
        )


def refuse_quantised(config: PretrainedConfig, where: str, fix: str) -> None:
    """Raises UserError if weights are quantised: transformers may silently change them. where: key and value."""
    for shape in (config, config.get_text_config()):
        found = getattr(shape, "quantization_config", None)
        if found:
            method = found.get("quant_method", "of unknown method") if isinstance(found, dict) else type(found).__name__
            raise UserError(f"{where}: its weights are quantised (quantization_config in config.json: {method}); {fix}")


def _new_config(
    section: ModelSection, model_class: str, decided: Mapping[str, Any], sequence_length: int
) -> PretrainedConfig:
    """Config of a new model. decided: arguments set by data and task unless the section sets them."""
    architecture = str(section.architecture)
    known, kind = getattr(transformers, model_class)._model_mapping._model_mapping, KINDS[model_class]
    if architecture not in known:
        hint = meant(architecture, known, f"use a Hugging Face model_type with a {kind}")
        raise UserError(f"model.architecture = {architecture}: transformers has no such {kind}; {hint}")
    defaults = AutoConfig.for_model(architecture)
    _check_keys(section.config, defaults, model_class)
    given = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **decided}
    if hasattr(defaults, "max_position_embeddings"):
        before = positions_before(architecture, {**given, **section.config}["pad_token_id"])
        given["max_position_embeddings"] = sequence_length + before
    try:
        return AutoConfig.for_model(architecture, **{**given, **section.config})
    except Exception as error:  # from huggingface_hub, or caused by a wrong size
        raise _wrong_shape(section, error, model_class) from error


def _is_read(key: str, config: PretrainedConfig, model_class: str) -> bool:
    """Whether the architecture's code reads a key that its config class lacks, as many do with head_dim."""
    model = getattr(transformers, model_class)._model_mapping.get(type(config), None)
    if not isinstance(model, type):
        return False
    source = inspect.getsource(sys.modules[model.__module__])
    return re.search(rf'getattr\((?:self\.)?config, "{re.escape(key)}"', source) is not None


def _check_keys(given: dict, config: PretrainedConfig, model_class: str) -> None:
    """Refuse unknown keys, which transformers silently keeps as attributes, and invalid sizes and probabilities."""
    defaults = config.to_dict()
    known = {*defaults, *config.attribute_map}
    if model_class == SEQ2SEQ_LM:
        known.add("decoder_start_token_id")  # T5's config accepts it without declaring it
    for key in given:
        if key not in known and not _is_read(key, config, model_class):
            hint = meant(key, known, "see that architecture's Hugging Face config")
            if key in ("rope_theta", "rope_scaling") and "rope_parameters" in known:
                hint = "set model.config.rope_parameters={rope_type: ..., rope_theta: ..., ...}"
            raise UserError(f"model.config.{key}: a {config.model_type} config has no such key; {hint}")
    own = {name: general for general, name in config.attribute_map.items()}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        least, usual = int(own.get(key, key) in _NEEDED), defaults.get(config.attribute_map.get(key, key))
        if _SIZE.fullmatch(key) and value < least and not (isinstance(usual, int) and usual < least):
            raise UserError(f"model.config.{key} = {value}: is not a valid size; give {least} or more")
        if is_dropout(key) and not 0 <= value < 1:
            raise UserError(f"model.config.{key} = {value}: is not a probability; give 0 or more, and less than 1")


def weights_identity(name: str) -> str:
    """The identity of a model's weights: sha256 over the names and contents of its weight files, wherever they lie.
    A hub's files are downloaded, as loading them would. Raises OSError."""
    digest = hashlib.sha256()
    for path in _weight_files(name):
        blob = path.resolve()  # the hub's cache names a large file by its sha256
        known = blob.parent.name == "blobs" and len(blob.name) == 2 * digest.digest_size
        digest.update(f"{path.name}\0{blob.name if known else file_sha256(path)}\0".encode())
    return f"sha256:{digest.hexdigest()}"


def config_identity(name: str) -> str:
    """The identity of how a model computes with its weights: sha256 over its config.json. Raises OSError."""
    beside = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
    given = json_text.object_in(Path(str(cached_file(name, CONFIG_NAME))))
    return json_text.json_sha256({key: given[key] for key in given.keys() - beside}, sort_keys=True)


def _weight_files(name: str) -> list[Path]:
    """A model's weight files: all in a folder; of the hub's those that `from_pretrained` would load."""
    if Path(name).is_dir():
        return sorted(path for pattern in ("*.safetensors", "*.bin") for path in Path(name).glob(pattern))
    problem: OSError | None = None
    for whole, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        try:
            return [Path(str(cached_file(name, whole)))]
        except OSError as error:
            problem = problem or error
        with suppress(OSError):
            return sorted(map(Path, get_checkpoint_shard_files(name, cached_file(name, index))[0]))
    assert problem is not None
    raise problem
