"""Copies of a run's modules that run the architecture's own code: no kernels, regions, compiler or patches."""

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map_only

from training.engine import Engine
from training.engine.tensors import whole_weight

_EMPTY = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Weights = dict[str, torch.Tensor]


def weights_of(engine: Engine, module: torch.nn.Module, *, leaving: tuple[str, ...] = ()) -> Weights:
    """The weights that the module computes with, by name; copies at ZeRO-3, where this is a collective. leaving: name
    prefixes to leave out."""
    named = (item for item in module.named_parameters(remove_duplicate=False) if not item[0].startswith(leaving))
    return {name: whole_weight(engine, item) if engine.stage == 3 else item.detach() for name, item in named}


def plain(module: Any, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None, attention: str) -> Any:
    """A copy of the module in evaluation mode with these weights, cast to `dtype` unless None. attention: the
    implementation to use."""
    kind: Any = type(module)
    while kind.__base__.__name__ == kind.__name__:  # a kernel's subclass of the architecture's own class
        kind = kind.__base__
    found = kind.__new__(kind)
    found.__dict__ = {name: value for name, value in module.__dict__.items() if name != "forward"}
    found.__dict__ |= {name: OrderedDict() for name in _EMPTY}
    own = {name: weights.get(name) for name in module._parameters}
    found._parameters = {name: None if value is None else _cast(value, dtype) for name, value in own.items()}
    buffers = _rebuilt(kind, module)._buffers.items()
    found._buffers = {name: None if value is None else _cast(value, dtype) for name, value in buffers}
    found._modules = {}
    for name, child in module._modules.items():
        inside = {key.removeprefix(f"{name}."): item for key, item in weights.items() if key.startswith(f"{name}.")}
        found._modules[name] = None if child is None else plain(child, inside, dtype, attention)
    if hasattr(getattr(found, "config", None), "_attn_implementation"):
        found.config = copy.copy(found.config)
        found.config._attn_implementation = attention
    found.training = False
    return found


@contextmanager
def unhooked(module: torch.nn.Module) -> Iterator[None]:
    """Context manager: the module and those inside it have no hooks, of the engine or of observers."""
    with ExitStack() as stack:
        for item, hooks in product(module.modules(), _EMPTY):
            stack.enter_context(patch.object(item, hooks, OrderedDict()))
        yield


def own_code(module: torch.nn.Module, weights: Weights, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The module's own code, with what patched it, on these inputs and weights."""
    with unhooked(module), _reparametrize_module(module, weights, tie_weights=True):
        return module.forward(*args, **kwargs)


def _rebuilt(kind: type, module: Any) -> Any:
    """The module; one with nothing but buffers and a config, such as a rotary table, is built again from its config."""
    if module._parameters or module._modules or not module._buffers or getattr(module, "config", None) is None:
        return module
    return kind(module.config).to(next(iter(module._buffers.values())).device)


def in_dtype(tree: Any, dtype: torch.dtype | None) -> Any:
    """The tree with detached tensors, floating ones cast to `dtype` unless None."""
    return tree_map_only(torch.Tensor, partial(_cast, dtype=dtype), tree)


def _cast(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return value.detach().to(dtype) if dtype is not None and value.is_floating_point() else value.detach()


def is_random(module: torch.nn.Module) -> bool:
    """Whether the module, or one inside it, draws random numbers in training."""
    return any(map(drops, module.modules()))


def drops(module: torch.nn.Module) -> bool:
    """Whether the module's own code drops values in training, by the names that torch and transformers give rates."""
    named = vars(module).items()
    return any((name == "p" or "drop" in name) and isinstance(rate, float) and rate > 0 for name, rate in named)
