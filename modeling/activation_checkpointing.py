"""Recompute activations in the backward pass instead of keeping them (Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost").

Blocks are recomputed through transformers' own switch, with either of torch's implementations. Two modes recompute less
than a block, with the non-reentrant one:

- *attention* (Korthikanti et al. 2022, section 5): the attention module, including its projections.
- *ops*: selective checkpointing, like torchtitan's `op`. Results of matmuls and fused attention are kept; everything
  else is recomputed from them. torch's own version requires the recomputation to repeat every operator of the forward
  pass, but ZeRO-3 gathers other parameters there; nor does it notice a kept result being overwritten through a view, as
  ZeRO-3's linear layers do. Every mode replays the same random numbers, so dropout drops the same values.
"""

import functools
import types
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from config.errors import UserError

KEPT_OPERATORS = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "_grouped_mm", "convolution"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        *("_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward"),
    )
)
"""The expensive operators of a block. Not `bmm`: in eager attention it computes the matrix that must not be kept."""
_CACHES = ("past_key_values", "past_key_value", "layer_past")


def apply_activation_checkpointing(model: PreTrainedModel, mode: str, *, reentrant: bool, every: int = 2) -> int:
    """Enable activation checkpointing; returns how many blocks are recomputed, at least in part. Raises UserError.

    selective: every `every`-th block, counted from the first. budget: every block, until
    `modeling.activation_checkpointing_budget` has measured how many have to be.
    """
    if mode == "none":
        return 0
    blocks = blocks_of(model)
    if mode == "attention":
        return _recompute_attention(model, blocks)
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"model.activation_checkpointing = {mode}: {type(model).__name__} does not support it; set it to none"
        )
    if mode != "full" and not blocks:
        raise UserError(
            f"model.activation_checkpointing = {mode}: no blocks were found in {type(model).__name__}; set it to full "
            "or none"
        )
    options: dict[str, Any] = {"use_reentrant": reentrant}
    if mode == "ops":
        options["context_fn"] = _keeping
        _call_flex_attention_without_modes()
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # transformers before 5.20 or so
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if mode == "selective":
        recompute_blocks(blocks, range(0, len(blocks), every))
    return sum(bool(block.gradient_checkpointing) for block in blocks)


def blocks_of(model: torch.nn.Module) -> list[GradientCheckpointingLayer]:
    """The modules that can be recomputed individually, in model order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute_blocks(blocks: Sequence[GradientCheckpointingLayer], chosen: Collection[int]) -> None:
    """Recompute exactly these blocks, by index, from the next forward pass on. Checkpointing must be switched on."""
    for index, block in enumerate(blocks):
        block.gradient_checkpointing = index in chosen


def _recompute_attention(model: PreTrainedModel, blocks: Sequence[GradientCheckpointingLayer]) -> int:
    found = [[module for module in block.modules() if is_attention(module)] for block in blocks]
    for module in (module for modules in found for module in modules):
        # A method, so that a copy of the model recomputes its own attention and not the original's.
        module.forward = types.MethodType(_recomputed_forward, module)
    count = sum(bool(modules) for modules in found)
    if not count:
        raise UserError(
            f"model.activation_checkpointing = attention: no attention was found in the blocks of "
            f"{type(model).__name__}; set it to selective, full or none"
        )
    return count


def is_attention(module: torch.nn.Module) -> bool:
    """Whether mode `attention` recomputes a module: attention by its class name, and no attention below it."""
    below = list(module.modules())[1:]
    return (
        "Attention" in type(module).__name__
        and bool(below)
        and not any("Attention" in type(child).__name__ for child in below)
    )


def _recomputed_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    forward = functools.partial(type(self).forward, self)
    caching = any(kwargs.get(name) is not None for name in _CACHES)  # recomputation would write to the cache again
    if caching or not (self.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _call_flex_attention_without_modes() -> None:
    """Keep FlexAttention a compiled graph, which torch does not enter while a mode like `_Keep` sees operators."""
    function = ALL_ATTENTION_FUNCTIONS["flex_attention"]
    if hasattr(function, "__wrapped__"):
        return

    @functools.wraps(function)
    def attend(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["flex_attention"] = attend


def _keeping() -> "tuple[_Keep, _Reuse]":
    """Contexts for a block's forward pass and for its recomputation: the `context_fn` of torch's `checkpoint`."""
    results: deque[tuple[Any, ...]] = deque()
    return _Keep(results), _Reuse(results)


class _Keep(TorchDispatchMode):
    """Records the results of kept operators in call order, copying each before anything in the block overwrites it."""

    def __init__(self, results: deque[tuple[Any, ...]]) -> None:
        super().__init__()
        self._results = results
        """(call, value, versions of its tensors)."""
        self._places: dict[int, int] = {}
        """Maps a storage's address to the index of the result that it holds."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        for index in {
            self._places.pop(tensor.untyped_storage()._cdata, None) for tensor in _written(func, args, kwargs)
        }:
            if index is not None:
                call, value, _ = self._results[index]
                copy = tree_map_only(torch.Tensor, torch.clone, value)
                self._results[index] = call, copy, _versions(copy)
        output = func(*args, **kwargs)
        if is_kept(func, args, kwargs):
            value = tree_map_only(torch.Tensor, torch.Tensor.detach, output)
            self._places |= {tensor.untyped_storage()._cdata: len(self._results) for tensor in _tensors(value)}
            self._results.append((_call(func, args), value, _versions(value)))
        return output


class _Reuse(TorchDispatchMode):
    """Returns each kept result once instead of recomputing it, so that it is freed after use."""

    def __init__(self, results: deque[tuple[Any, ...]]) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not is_kept(func, args, kwargs):
            return func(*args, **kwargs)
        call, value, versions = self._results.popleft() if self._results else (None, None, None)
        if (_call(func, args), _versions(value)) != (call, versions):
            raise RuntimeError(
                f"model.activation_checkpointing = ops: a block calls {_call(func, args)} in its recomputation, and "
                f"{call} in its forward pass, or its result was overwritten since"
            )
        return value


def _call(func: Any, args: tuple) -> tuple[Any, ...]:
    return func, *(tensor.shape for tensor in _tensors(args))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves(tree) if isinstance(item, torch.Tensor)]


def _versions(value: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(value)]


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator may write to. Collectives do not declare them in their schema."""
    schema = func._schema
    if schema.name.endswith("_") and not schema.is_mutable:
        return _tensors((args, kwargs))
    given = _given(func, args, kwargs) if schema.is_mutable else {}
    return _tensors([given.get(argument.name) for argument in schema.arguments if argument.is_write])


def is_kept(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether `ops` keeps an operator's result."""
    if func._schema.name not in KEPT_OPERATORS:
        return False
    # An operator that draws random numbers must be recomputed, or later draws would differ.
    return not _given(func, args, kwargs).get("dropout_p")


def _given(func: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
