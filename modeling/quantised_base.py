"""A frozen base in 4 or 8 bits: how it is loaded, what it holds, and the weights that it represents.

transformers quantises it tensor by tensor with `bitsandbytes`, from the values in the model's own files: the codes do
not depend on precision.compute, rank or ZeRO stage. Embeddings, norms and the output embedding are not quantised.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from config.extras import require
from config.schema import AdapterSection


def loading_options(section: AdapterSection, auto: Any, config: PretrainedConfig, options: dict) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a quantised base. auto: the class that loads it."""
    with torch.device("meta"):
        model = auto.from_config(config, **options)
    head = model.get_output_embeddings()
    skipped = [*(name for name, module in model.named_modules() if module is head), *section.modules_to_save]
    return {"quantization_config": settings(section, skipped=skipped)}


def settings(section: AdapterSection, *, skipped: list[str] | None = None) -> Any:
    """The `BitsAndBytesConfig` of a base. skipped: modules not to quantise; None: transformers' default."""
    require("bitsandbytes", f"adapter.base={section.base}")
    from transformers import BitsAndBytesConfig

    if section.base == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=section.double_quant,
        bnb_4bit_compute_dtype=torch.float32,  # decides the dtype in which peft makes factors; no layer reads it here
        llm_int8_skip_modules=skipped,
    )


def compute_as_inputs(model: torch.nn.Module) -> None:
    """Let quantised layers compute in the dtype of their input, in place (see `modeling.quantised_layers`)."""
    from modeling.quantised_layers import freeze

    for module in model.modules():
        freeze(module)


def freeze_quantised(model: PreTrainedModel) -> None:
    """Apply `compute_as_inputs` and make the model, in place, an ordinary one that can be cast and saved."""
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(model, recurse=True)
    compute_as_inputs(model)
    for name in ("hf_quantizer", "quantization_method", "is_quantized", "hf_device_map"):
        model.__dict__.pop(name, None)
    for shape in (model.config, model.config.get_text_config()):
        shape.__dict__.pop("quantization_config", None)


def quantised_layers(model: torch.nn.Module) -> dict[str, Any]:
    """The quantised layers by name: each has `scales()`, `whole_shape` and `rebuilt(dtype)`, its weights."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "rebuilt")}


def quantised_parameters(model: torch.nn.Module) -> dict[int, Any]:
    """The quantised layers by the id of their weight, which holds codes."""
    return {id(layer.weight): layer for layer in quantised_layers(model).values()}


def stored_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The codes that this rank holds, and all scales."""
    for layer in quantised_layers(model).values():
        yield getattr(layer.weight, "ds_tensor", layer.weight).data
        yield from layer.scales()
