"""Compile the transformer blocks of a model with `torch.compile`, and run uncompiled while hooks are registered.

Blocks of equal shape share one graph, so compiling 48 of them takes as long as compiling one. Code around a block is
not compiled: activation checkpointing, DeepSpeed's hooks on parameters, hooks on the block itself.

Hooks inside a compiled block do not fire, and all diagnostics here are hooks or dispatch modes. So each call first
checks for them, and runs the block eagerly if there are any. Both ways draw the same random numbers in the same order.
"""

import functools
import inspect
import shlex
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from config.errors import UserError
from modeling.activation_checkpointing import blocks_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CHECKPOINTS_IN_FORWARD = "__call__" not in GradientCheckpointingLayer.__dict__
"""Whether transformers calls torch's checkpointing inside the blocks' forward; before about 5.20, around it."""
_OPTIONS: dict[str, Any] = {
    # Round where the block's own code rounds: a fused chain of 16-bit operators would round once, at its end.
    "emulate_precision_casts": True,
    # torch's generators instead of the compiler's own, with which dropout would drop other values.
    "fallback_random": True,
}


class CompiledBlock:
    """Replaces one block's `forward`. Must be installed last, after DeepSpeed and all permanent hooks."""

    def __init__(self, block: GradientCheckpointingLayer) -> None:
        """Raises ValueError if the block's forward is not that of its class."""
        if "forward" in block.__dict__:
            raise ValueError(f"the forward of {type(block).__name__} has been replaced")
        self._block: Any = block
        self._own = block.forward
        # Checkpointing stays outside, or the compiler would choose by itself what the backward pass recomputes.
        own: Any = type(block).forward
        function = own.__wrapped__ if _CHECKPOINTS_IN_FORWARD else own
        self._compiled = torch.compile(
            types.MethodType(function, block), fullgraph=True, dynamic=False, options=dict(_OPTIONS)
        )
        self._inside = [module for module in block.modules() if module is not block]
        self._hooks, self._parameters = self._now_hooks(), self._now_parameters()
        self.compiled_calls = 0
        """Calls that ran compiled; recomputation is not counted."""
        self.own_calls = 0
        """Calls that ran the block eagerly: in evaluation, and under hooks or modes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Recomputation, which older transformers run through here, is part of the backward pass.
        counted = torch._C._current_graph_task_id() == -1
        if self._watched() or not (self._block.training and torch.is_grad_enabled()):
            self.own_calls += counted
            return self._own(*args, **kwargs)
        self.compiled_calls += counted
        if _CHECKPOINTS_IN_FORWARD and self._block.gradient_checkpointing:
            return self._block._gradient_checkpointing_func(functools.partial(self._compiled, **kwargs), *args)
        return self._compiled(*args, **kwargs)

    def _watched(self) -> bool:
        """Whether a hook or mode is active that has to see inside the block."""
        modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
        of_all_modules = any(getattr(global_hooks, f"_global{name}") for name in _HOOKS)
        # Different parameters: the caller has replaced them to compute in another dtype.
        return bool(
            modes or of_all_modules or self._now_hooks() != self._hooks or self._now_parameters() != self._parameters
        )

    def _now_hooks(self) -> int:
        return sum(len(getattr(module, name)) for module in self._inside for name in _HOOKS)

    def _now_parameters(self) -> list[int]:
        return [id(parameter) for parameter in self._block.parameters()]


def quote_library_folders() -> None:
    """Let the compiler's linker find torch in a path with a space: torch 2.13 quotes folders of headers only."""
    from torch._inductor import cpp_builder

    if "-L{lib_dir} " not in inspect.getsource(cpp_builder.CppBuilder):
        return
    options: Any = cpp_builder.BuildOptionsBase
    unquoted = inspect.unwrap(options.get_libraries_dirs)

    @functools.wraps(unquoted)
    def quoted(self: Any) -> list[str]:
        return [shlex.quote(folder) for folder in unquoted(self)]

    options.get_libraries_dirs = quoted


def compile_blocks(model: nn.Module, run: Callable[[], None]) -> str:
    """Compile every block in one forward pass, `run`, of the run's shapes; returns a line to log. Raises UserError."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # imports the whole compiler

    quote_library_folders()
    blocks = blocks_of(model)
    started = time.perf_counter()
    try:
        if not blocks:
            raise ValueError("no blocks are found")
        for block in blocks:
            block.forward = CompiledBlock(block)
        run()
    except (ValueError, TorchDynamoException, FailOnRecompileLimitHit) as problem:
        reason = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
        raise UserError(f"model.compile = true: {type(model).__name__}: {reason}; remove it") from problem
    return f"{len(blocks)} blocks are compiled ({time.perf_counter() - started:.1f} s for the forward pass)"
