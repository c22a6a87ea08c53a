"""A module of the run as its architecture's own code computes it, without kernels, regions, compiler and patches."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from training.engine import Engine
from training.engine.tensors import whole_weight

_EMPTY = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Weights = dict[str, torch.Tensor]


def weights_of(engine: Engine, module: torch.nn.Module, *, leaving: tuple[str, ...] = ()) -> Weights:
    """The weights that the module computes with, by their names in it. leaving: prefixes of names that are not needed.

    A collective at ZeRO-3, which gathers copies.
    """
    named = (item for item in module.named_parameters(remove_duplicate=False) if not item[0].startswith(leaving))
    return {name: whole_weight(engine, item) if engine.stage == 3 else item.detach() for name, item in named}


def plain(module: Any, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None, attention: str) -> Any:
    """A copy that computes with these weights, in `dtype` or, for None, in theirs, and without dropout.

    attention: name of the implementation, of modules that have one.
    """
    kind: Any = type(module)
    while kind.__base__.__name__ == kind.__name__:  # a kernel's class: its base has the architecture's own code
        kind = kind.__base__
    found = kind.__new__(kind)
    found.__dict__ = {name: value for name, value in module.__dict__.items() if name != "forward"}
    found.__dict__ |= {name: OrderedDict() for name in _EMPTY}
    own = {name: weights.get(name) for name in module._parameters}
    found._parameters = {name: None if value is None else in_dtype(value, dtype) for name, value in own.items()}
    found._buffers = in_dtype(dict(_rebuilt(kind, module)._buffers), dtype)
    found._modules = {}
    for name, child in module._modules.items():
        inside = {key.removeprefix(f"{name}."): item for key, item in weights.items() if key.startswith(f"{name}.")}
        found._modules[name] = None if child is None else plain(child, inside, dtype, attention)
    if hasattr(getattr(found, "config", None), "_attn_implementation"):
        found.config = copy.copy(found.config)
        found.config._attn_implementation = attention
    found.training = False
    return found


def _rebuilt(kind: type, module: Any) -> Any:
    """A module that has nothing but buffers, such as a rotary table, built again from its config where it has one."""
    if module._parameters or module._modules or not module._buffers or getattr(module, "config", None) is None:
        return module
    device = next(iter(module._buffers.values())).device
    return kind(module.config).to(device)


def in_dtype(tree: Any, dtype: torch.dtype | None) -> Any:
    """A tree of detached tensors, the floating ones in `dtype`, or in their own for None."""

    def convert(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value

    return tree_map(convert, tree)


def is_random(module: torch.nn.Module) -> bool:
    """Whether a training pass through it draws random numbers."""
    named = (item for inner in module.modules() for item in vars(inner).items())  # by torch and by transformers
    return any((name == "p" or "drop" in name) and isinstance(rate, float) and rate > 0 for name, rate in named)
