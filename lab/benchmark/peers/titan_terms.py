"""A benchmark's work in torchtitan's configuration, or why it cannot be expressed there. Needs no torchtitan."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from config.errors import UserError
from lab.benchmark.spec import Spec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VERSION = "0.3.0"
"""The supported release of torchtitan, whose configuration changes between releases."""
NEEDED = (
    *("torchtitan", "torchdata", "torch_checkpointing", "spmd_types", "tyro", "docstring_parser"),
    *("tensorboard", "absl", "triton"),
)
"""Modules that its trainer imports but requirements.txt does not install; triton comes with torch for CUDA."""
UNDECAYED = r"(^|[._])norm\.weight$|\.bias$|^tok_embeddings\."
"""Names in its Llama, whose output weight is tied to `tok_embeddings.weight`; see `modeling.parameter_groups`."""
RESHARD = {0: "never", 1: "never", 2: "never", 3: "always"}
"""Whether, by ZeRO stage, a block's weights are resharded after forward and gathered again for backward. Its FSDP2
shards gradients and optimizer state at every stage but 0, and between steps also the weights."""
PARAMETERS = {"fp32": "float32", "bf16": "bfloat16"}
"""Its `mixed_precision_param`, by compute. Gradients are reduced in float32, its only choice."""


def unavailable_reason() -> str | None:
    """Why torchtitan cannot be imported here; None if no reason is known."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if not missing:
        return None
    return f"{', '.join(missing)} cannot be imported; make titan installs torchtitan {VERSION} separately"


def unsupported_reason(spec: Spec) -> str | None:
    """Why torchtitan cannot train this work; None if it can. Reads the model's configuration."""
    from transformers import AutoConfig

    if spec.compute not in PARAMETERS:
        return f"torchtitan has no {spec.compute}; its parameters are float32 or bfloat16 in forward and backward"
    if spec.offload != "none":
        return f"it offloads parameters, gradients and optimizer state together, and not the {spec.offload} alone"
    if spec.activation_checkpointing not in ("none", "full"):
        return f"it has no activation checkpointing like {spec.activation_checkpointing}"
    try:
        require_llama(AutoConfig.from_pretrained(spec.model))
    except UserError as error:
        return str(error)
    return None


def require_llama(config: PretrainedConfig) -> dict[str, Any]:
    """Arguments of its `ComplexRoPE.Config` for a Llama: theta, and those of Llama 3's scaling if used.

    Raises UserError if its Llama cannot be this model.
    """
    if config.model_type != "llama":
        raise UserError(f"this loop supports only llama of its models, not {config.model_type}")
    its = {"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "hidden_act": "silu"}
    for key, value in its.items():
        if getattr(config, key, value) != value:
            raise UserError(f"its Llama has {key} = {value}, this one {getattr(config, key)}")
    return _rope(dict(config.rope_parameters))


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rotary embeddings as in `transformers.modeling_rope_utils`; only "default" and "llama3" are supported."""
    kind, theta = parameters.get("rope_type", "default"), parameters["rope_theta"]
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("its Llama rotates whole heads; this one has a partial_rotary_factor")
    if kind == "default":
        return {"theta": theta, "scaling": "none"}
    if kind != "llama3":
        raise UserError(f"its Llama's rotary embeddings are default or llama3; this one's are {kind}")
    same = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    scaling = {name: parameters[name] for name in same}
    return {"theta": theta, "scaling": "llama", "scaling_factor": parameters["factor"], **scaling}
