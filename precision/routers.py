"""FP32 routers of experts on the cast path, where the rest of the model is 16-bit.

A router chooses by comparing logits. In BF16, with 8 bits of mantissa, logits that differ by less than 0.4% may become
equal, so that rounding chooses the experts, and the softmax amplifies the remaining error (Fedus et al. 2021, "Switch
Transformers", section 2.4, "selective precision"; Zoph et al. 2022, "ST-MoE", section 3.4). Weights and inputs stay in
16 bits; products, softmax and choice are FP32. On the manifest path the manifest decides (`precision.manifest`).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from precision.findings import tensors_of
from precision.manifest import is_router, router_regions
from precision.regions import cast, own_parameters_in

_NARROW = ("DbrxExperts", "InklingSharedExperts")
"""Classes whose code joins a router's weights to 16-bit tensors by operators that take one dtype only."""


def compute_routers_in_fp32(model: torch.nn.Module) -> dict[str, str]:
    """Make a 16-bit model's routers compute in FP32, before DeepSpeed gets the model; returns `router_regions`."""
    found = router_regions(model)
    for name in found:
        module = model.get_submodule(name)
        module.forward = _in_fp32(module, module.forward)
    for module in model.modules():
        if type(module).__name__ in _NARROW:
            module.forward = _in_one_dtype(module.forward)
    return found


def _in_fp32(module: torch.nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    # Llama 4's router is a linear layer, and its scores weight the inputs of 16-bit experts, not their outputs.
    narrows = isinstance(module, torch.nn.Linear) and is_router(module)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = next((item.dtype for item in tensors_of((args, kwargs)) if item.is_floating_point()), torch.float32)
        args, kwargs = cast((args, kwargs), (torch.bfloat16, torch.float16), torch.float32)
        with own_parameters_in(module, torch.float32):
            output = original(*args, **kwargs)
        return cast(output, (torch.float32,), given) if narrows else output

    return forward


def _in_one_dtype(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast((args, kwargs), (torch.float32,), hidden.dtype)
        return original(hidden, *args, **kwargs)

    return forward
