"""Low-rank adapters on a frozen model (Hu et al. 2021, LoRA; Liu et al. 2024, DoRA), with the `peft` library.

Adapters go into the model's own layers: the model keeps its class, and `q_proj` becomes a layer that holds the frozen
`base_layer` and the trainable `lora_A.default` and `lora_B.default`. Their initial values depend only on the seed and
their names, so every rank and every layout starts from the same FP32 numbers, before anything is rounded.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from config.errors import UserError, one_line
from config.schema import AdapterSection
from config.task import CAUSAL_LM, SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION

NAME = "default"
"""Name of the only adapter; part of its parameters' names."""
_CLASSIFIERS = ("classifier", "score")
"""Attribute names of the head that computes a classifier's logits, as in `peft`."""
_TASK_TYPES = {
    CAUSAL_LM: "CAUSAL_LM",
    SEQ2SEQ_LM: "SEQ_2_SEQ_LM",
    SEQUENCE_CLASSIFICATION: "SEQ_CLS",
    TOKEN_CLASSIFICATION: "TOKEN_CLS",
}
"""Maps a model class to `peft`'s task type; other classes have none."""


def adapter_config(section: AdapterSection, model: torch.nn.Module, *, model_class: str, whole: Sequence[str]) -> Any:
    """The `peft.LoraConfig` for the config's section. whole: names of the modules that are trained in full."""
    from peft import LoraConfig

    targets = section.target_modules
    unfit = {name.rpartition(".")[2] for name, module in model.named_modules() if not is_adaptable(module)}
    return LoraConfig(
        task_type=_TASK_TYPES.get(model_class),
        r=section.r,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        use_rslora=section.rslora,
        use_dora=section.kind == "dora",
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
        exclude_modules=sorted(unfit) or None,
        modules_to_save=list(whole) or None,
        init_lora_weights="gaussian" if section.init == "gaussian" else True,
    )


def is_adaptable(module: torch.nn.Module) -> bool:
    """Whether a low-rank product can be added to a layer's output; not if it is linear in name only, such as the
    routers of Llama 4 and Phi-3.5-MoE, which return a choice, and the grouped projection of DeepSeek V4."""
    kind = type(module)
    if not isinstance(module, torch.nn.Linear) or kind.forward is torch.nn.Linear.forward:
        return True
    return not kind.__module__.startswith("transformers") or kind.__name__ == "FalconLinear"


def add_adapter(
    model: PreTrainedModel, section: AdapterSection, *, seed: int, model_class: str = CAUSAL_LM
) -> PreTrainedModel:
    """Freeze the model and insert the adapter, if any, in place; returns the same model. model_class: from
    config/task.py.

    Under ZeRO-3 the weights may be partitioned already, and a model on the meta device stays there. Raises UserError.
    """
    if section.kind == "none":
        return model
    adapted: Any = wrapped_with_adapter(model, section, seed=seed, model_class=model_class).get_base_model()
    return adapted


def wrapped_with_adapter(
    model: PreTrainedModel, section: AdapterSection, *, seed: int, model_class: str = CAUSAL_LM
) -> Any:
    """The adapted model as a `peft.PeftModel` wrapper, which other libraries expect. Raises UserError."""
    from peft import get_peft_model

    _require_modules(section, model)
    whole = _trained_whole(section, model, model_class=model_class)
    layers = ((name, one) for name, one in model.named_modules() if one is not model.get_output_embeddings())
    linear = {name.rpartition(".")[2] for name, layer in layers if isinstance(layer, torch.nn.Linear)}
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        torch.manual_seed(seed)
        # peft reads this attribute by the name it had in older versions of transformers
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        try:
            wrapped = get_peft_model(
                model,
                adapter_config(section, model, model_class=model_class, whole=whole),
                autocast_adapter_dtype=False,
            )
        except (ValueError, TypeError) as error:
            fit = ", ".join(sorted(name for name in linear if f"'{name}'" not in str(error)))
            raise UserError(
                f"adapter.target_modules = {', '.join(section.target_modules)}: {one_line(error)}; name some of {fit}"
            ) from error
    adapted: Any = wrapped.get_base_model()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            value = None if parameter.is_meta else initial_value(section, name, parameter.shape, seed=seed)
            if value is not None:
                parameter.copy_(value)
    return wrapped


def _trained_whole(section: AdapterSection, model: Any, *, model_class: str) -> list[str]:
    """Names of the modules trained in full beside the factors: `modules_to_save`, and those the base's files lack.

    A classifier's head is always included, as in `peft`. Missing parameters were drawn at random (`model.drawn`), so
    the base alone cannot restore them. Raises UserError for one whose module also has parameters from the files.
    """
    found = list(section.modules_to_save)
    if model_class in (SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION):
        found += [name for name in _CLASSIFIERS if hasattr(model, name)]
    lacking = set(getattr(model, "drawn", ()))
    own = {id(item) for name, item in model.named_parameters() if name in lacking}
    for name in sorted(lacking):
        owners = [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)]
        if any(owner.endswith(one) for owner in owners for one in found):
            continue
        whole = [one for one in owners if all(id(item) in own for item in model.get_submodule(one).parameters())]
        if not whole:
            raise UserError(
                f"model.name_or_path has no {name}, which stays at random values under an adapter; name its module "
                f"{owners[0] if owners else name} in adapter.modules_to_save, or give a model that has it"
            )
        found.append(whole[-1])
    return list(dict.fromkeys(found))


def _require_modules(section: AdapterSection, model: PreTrainedModel) -> None:
    """Raise UserError for a name of no module; `peft` ignores one that is beside valid names."""
    known, modules = dict(model.named_modules()), as_peft_reads(section, model).target_modules
    targets = [name for name in section.target_modules if name != "all-linear" and name in modules]
    absent = [
        *(("target_modules", name) for name in targets if not any(f".{one}".endswith(f".{name}") for one in known)),
        *(("modules_to_save", name) for name in section.modules_to_save if not any(o.endswith(name) for o in known)),
    ]
    for name, module in known.items():
        own = next((target for target in targets if f".{name}".endswith(f".{target}")), None)
        if own is not None and not is_adaptable(module):
            problem = f"{name} is a {type(module).__name__}, to whose output no low-rank product can be added"
            raise UserError(f"adapter.target_modules = {', '.join(section.target_modules)}: {problem}; leave out {own}")
    if absent:
        key, name = absent[0]
        ends = {one.rpartition(".")[2] for one in known}
        listed = ", ".join(sorted(end for end in ends if end and not end.isdecimal()))
        problem = f"adapter.{key} = {', '.join(getattr(section, key))}: the model has no module {name}"
        raise UserError(f"{problem}; name some of {listed}")


def as_peft_reads(section: AdapterSection, model: PreTrainedModel) -> Any:
    """A `peft.LoraConfig` with the targets. For mixtures of experts `peft` also knows the names that the hub's files
    have, such as `w1` or `up_proj` of experts that transformers fuses, and replaces them by those of parameters, in
    `target_parameters`. Raises UserError."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    targets = section.target_modules
    given = LoraConfig(target_modules=targets[0] if targets == ("all-linear",) else list(targets))
    try:
        convert_peft_config_for_transformers(given, model, None)
    except ValueError as error:
        raise UserError(f"adapter.target_modules = {', '.join(targets)}: {one_line(error)}") from error
    return given


def head_weights(model: Any) -> set[int]:
    """ids of the parameters of the layer that computes the logits, including those of a copy that `peft` trains."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    if head is None:
        head = next((getattr(model, name) for name in _CLASSIFIERS if hasattr(model, name)), None)
    if head is None:
        return set()
    copies = getattr(head, "modules_to_save", None)
    heads = [head] if copies is None else [head.original_module, *copies.values()]
    found: set[int] = set()
    for one in heads:
        layers = [list(layer.parameters(recurse=False)) for layer in getattr(one, "base_layer", one).modules()]
        found.update(map(id, next((layer for layer in reversed(layers) if layer), [])))
    return found


def initial_value(section: AdapterSection, name: str, shape: torch.Size, *, seed: int) -> torch.Tensor | None:
    """A factor's initial value in FP32, zero for B so that the model starts as its base; None for other parameters."""
    if f".lora_B.{NAME}." in name:
        return torch.zeros(shape)
    if f".lora_A.{NAME}." not in name:
        return None
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
    if section.init == "gaussian":
        return torch.randn(shape, generator=generator) / section.r
    bound = 1 / math.sqrt(shape[1:].numel())
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def base_name(name: str) -> str:
    """Name of a parameter or module in the model without its adapter; a factor's name is returned unchanged."""
    for part in (".base_layer", ".original_module", f".modules_to_save.{NAME}"):
        name = name.replace(part, "")
    return name


def layers_with_factors(model: torch.nn.Module) -> dict[str, Any]:
    """`peft`'s layers by the name, in the model without its adapter, of the weight to which each adds its factors.

    Fused experts lie in one layer for each of their parameters, each inside of the next.
    """
    layers = ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))
    return {f"{base_name(name)}.{getattr(module, 'parameter_name', 'weight')}": module for name, module in layers}


@contextmanager
def adapter_off(model: torch.nn.Module) -> Iterator[None]:
    """Context manager: the model computes as its base, without dropout. Parameters and requires_grad stay unchanged."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    # not `enable_adapters`, which also changes requires_grad without DeepSpeed noticing
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper)]
    trained = model.training
    for layer in layers:
        layer._disable_adapters = True
    model.eval()
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
        model.train(trained)
