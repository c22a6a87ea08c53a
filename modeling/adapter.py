"""Low-rank adapters on a frozen model (Hu et al. 2021, LoRA; Liu et al. 2024, DoRA), by the library `peft`.

The adapters are put into the model's own layers: it stays the class it is, `q_proj` becomes a layer that holds the
frozen `base_layer` and the trainable `lora_A.default` and `lora_B.default`. Their first values depend on the seed and
their names alone, so every rank and every layout starts from the same numbers, in FP32 before anything is rounded.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from config.adapter import peft_arguments, refused_targets, require_modules, trained_whole
from config.schema import AdapterSection
from config.task import CAUSAL_LM

NAME = "default"
"""Of the only adapter, in the names of its parameters."""


def adapter_config(section: AdapterSection, *, model_class: str, whole: Sequence[str]) -> Any:
    """The `peft.LoraConfig` of the config's section; see `peft_arguments`."""
    from peft import LoraConfig

    return LoraConfig(**peft_arguments(section, model_class=model_class, whole=whole))


def add_adapter(
    model: PreTrainedModel, section: AdapterSection, *, seed: int, model_class: str = CAUSAL_LM
) -> PreTrainedModel:
    """Freeze the model and put the adapter into it; the same model, changed in place. model_class: of config/task.py.

    Modules that the base's files lack are trained whole (`config.adapter.trained_whole`), those that
    `modeling.build` has drawn. Under ZeRO-3 the weights may be partitioned already. Raises UserError for modules that
    the model does not have.
    """
    adapted: Any = wrapped_with_adapter(model, section, seed=seed, model_class=model_class).get_base_model()
    return adapted


def wrapped_with_adapter(
    model: PreTrainedModel, section: AdapterSection, *, seed: int, model_class: str = CAUSAL_LM
) -> Any:
    """The same as the `peft.PeftModel` around the model, as other libraries want it. Raises UserError."""
    from peft import get_peft_model

    require_modules(section, (name for name, _ in model.named_modules()))
    whole = trained_whole(section, model, model_class=model_class, drawn=getattr(model, "drawn", ()))
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        torch.manual_seed(seed)
        # peft asks for it by the name that it had in older versions of transformers
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        try:
            wrapped = get_peft_model(
                model, adapter_config(section, model_class=model_class, whole=whole), autocast_adapter_dtype=False
            )
        except (ValueError, TypeError) as error:
            raise refused_targets(section, error) from error
    adapted: Any = wrapped.get_base_model()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            value = initial_value(section, name, parameter.shape, seed=seed)
            if value is not None:
                parameter.copy_(value)
    return wrapped


def initial_value(section: AdapterSection, name: str, shape: torch.Size, *, seed: int) -> torch.Tensor | None:
    """A factor's first value in FP32; None for a parameter that is no factor.

    A: uniform in +-1/sqrt(inputs) as torch's linear layers, or normal with deviation 1/r (`init: gaussian`). B: zero,
    so that the model starts as its base.
    """
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
    """The name that a parameter or module has in the model without adapter; a factor's stays as it is."""
    for part in (".base_layer", ".original_module", f".modules_to_save.{NAME}"):
        name = name.replace(part, "")
    return name


def whole_modules(names: Iterable[str]) -> list[str]:
    """The modules that an adapter trains whole, by the names of the parameters that it trains."""
    ends = f".modules_to_save.{NAME}."
    return sorted({name.partition(ends)[0] for name in names if ends in name})


def peft_name(name: str) -> str:
    """The name that a trained parameter has in a file of `peft`."""
    name = name.replace(f".modules_to_save.{NAME}", "").replace(f".{NAME}", "")
    return "base_model.model." + name.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def is_off(layer: torch.nn.Module) -> bool:
    """Whether a layer that an adapter is in computes as in the base now, inside `adapter_off`."""
    return bool(getattr(layer, "_disable_adapters", False))


@contextmanager
def adapter_off(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model computes as its base, without dropout. No parameter changes, nor whether it is trained."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    # not `enable_adapters`, which also sets what requires a gradient, under the nose of DeepSpeed
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
