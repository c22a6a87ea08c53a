"""Observes in which dtype every module really computes, and compares it with the manifest.

A `TorchDispatchMode` sees every operator below autograd and autocast, so the operands of `mm` have the dtype that the
kernel gets. An operator belongs to the innermost module whose `forward` is running. Backward passes run outside every
`forward` and are not counted, nor are the gradients that a chunked loss computes inside its head's; recomputations of
checkpointed blocks are. FLOPs are those of torch.utils.flop_counter, recorded under the dtype of the operands.

Observing does not change a pass's numbers, unless something chooses what to compute by whether hooks or modes are
present. Compiled blocks do, because hooks inside them would not fire: `training.step` observes them in a pass beside
the step. FlexAttention is a compiled graph too, which torch does not enter under a dispatch mode: it runs without the
mode, and its arguments are recorded.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from config.errors import UserError
from precision.dtypes import NAMES
from precision.fp8 import is_multiplying
from precision.inner_dtypes import FLEX, NORM_KERNELS, InnerDtypes

ROOT = "(model)"
"""Name under which matmuls in the model's own forward are recorded."""
# Maps an operator to the positions of its matrix operands.
_MATMULS = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::mv", "aten::dot", "aten::_scaled_mm"), (0, 1)),
    **dict.fromkeys(("aten::convolution", "aten::_grouped_mm"), (0, 1)),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addmv", "aten::_addmm_activation"), (1, 2)),
}
# Fused attention kernels, whatever their suffix; operands are query, key and value.
_ATTENTIONS = ("aten::_scaled_dot_product_", "flash_attn::_flash_attn", FLEX)
# Operators of norms; the operand is the first argument.
_NORMS = ("aten::rsqrt", *NORM_KERNELS)
_KERNELS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA, torch._C.DispatchKey.CompositeExplicitAutograd)


class PrecisionMismatch(UserError):
    """A module computed in a different dtype than the manifest says, or did not compute at all."""


class Observation:
    """`with Observation(model) as seen: model(...)`, then `seen.computed` and `seen.flops`."""

    def __init__(self, model: torch.nn.Module, *, in_backward: Callable[[], bool] = lambda: False) -> None:
        """in_backward: whether code that now runs inside a `forward` belongs to the backward pass."""
        self.flops: dict[str, int] = defaultdict(int)
        """Matmul FLOPs of the observed forward passes and recomputations, by dtype."""
        self._matmuls: dict[str, set[str]] = defaultdict(set)
        self._norms: dict[str, set[str]] = defaultdict(set)
        self.inner = InnerDtypes(model, root=ROOT)
        """The dtypes of operations other than matmuls."""
        self._model = model
        self._in_backward = in_backward
        self._running: list[str] = []
        self._exit = ExitStack()

    @property
    def computed(self) -> dict[str, set[str]]:
        """Maps a module name to the operand dtypes of its own matmuls; for norms, to those of the normalisation."""
        return {**self._norms, **self._matmuls}

    def flop_share(self) -> dict[str, float]:
        """Share of all matmul FLOPs by dtype, summing to 1; empty when nothing was observed."""
        total = sum(self.flops.values())
        return {name: count / total for name, count in sorted(self.flops.items())} if total else {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                enter = partial(self._enter, name or ROOT)
                stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                # always_call: checkpointing ends a recomputation early with an exception
                stack.enter_context(module.register_forward_hook(self._leave, always_call=True))
            stack.callback(ALL_ATTENTION_FUNCTIONS.__setitem__, FLEX, ALL_ATTENTION_FUNCTIONS[FLEX])
            ALL_ATTENTION_FUNCTIONS[FLEX] = partial(self._attend_without_mode, ALL_ATTENTION_FUNCTIONS[FLEX])
            stack.enter_context(_OperatorHook(self._see))
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()
        self._running.clear()

    def _enter(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not self._running:
            self.inner.forget()
        self._running.append(name)
        self.inner.enter(name, (args, kwargs))

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def _attend_without_mode(
        self, own: Callable[..., Any], module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with _disable_current_modes():
            output = own(module, query, key, value, *args, **kwargs)
        self._see(None, FLEX, (query, key, value), output)
        return output

    def _see(self, func: Any, name: str, args: tuple, output: Any) -> None:
        if "backward" in name or self._in_backward():
            return
        if not self._running:
            if torch._C._current_graph_task_id() == -1:  # not autograd, but the loss
                self.inner.see(None, name, args, output)
            return
        where = self._running[-1]
        self.inner.see(where, name, args, output)
        if name in _NORMS:
            self._norms[where].update(_dtypes(args, (0,)))
            return
        attention = name.startswith(_ATTENTIONS)
        operands = (0, 1, 2) if attention else _MATMULS.get(name)
        if operands is None:
            return
        dtypes = ["fp8"] * 2 if is_multiplying() else _dtypes(args, operands)
        self._matmuls[where].update(dtypes)
        if attention:
            self.inner.see_attention(where, name)
        else:
            self.inner.see_matmul(where, dtypes)
        self.flops[dtypes[0]] += _attention_flops(name, *args) if attention else _flops(func, name, args, output)


def verify(observation: Observation, dtypes: Mapping[str, str], *, may_idle: Collection[str] = ()) -> None:
    """Compare the observed dtypes with the assigned ones (`Regions.dtypes`, `Regions.may_idle`). Raises
    PrecisionMismatch if a module computed in a different dtype, or did not compute and is not in `may_idle`."""
    computed = observation.computed
    wrong = []
    for name, expected in dtypes.items():
        actual = computed.get(name, set())
        if not actual and name not in may_idle:
            wrong.append(f"{name}: {expected} was promised, but no computation of it was seen")
        elif actual - {expected}:
            wrong.append(f"{name}: {expected} was promised, but it computed in {' and '.join(sorted(actual))}")
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise PrecisionMismatch(
            f"{wrong[0]}{more}; module or kernel casts by itself: give it a rule with the dtype that it computes in"
        )


class _OperatorHook(TorchDispatchMode):
    """Calls `see` with every operator after it has run."""

    supports_higher_order_operators = True

    def __init__(self, see: Callable[[Any, str, tuple, Any], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            name = func._schema.name
            if name not in _MATMULS and not any(map(func.has_kernel_for_dispatch_key, _KERNELS)):
                # Under inference_mode, linear and the like arrive undecomposed: decompose them under this mode, but
                # never an operator with its own kernel: a decomposed silu_backward rounds more often.
                with self:
                    output = func.decompose(*args, **kwargs)
                if output is not NotImplemented:
                    return output
        else:
            name = str(func)
        output = func(*args, **kwargs)
        self._see(func, name, args, output)
        return output


def _dtypes(args: tuple, positions: tuple[int, ...]) -> list[str]:
    seen = [args[index].dtype for index in positions]
    return [NAMES.get(dtype, str(dtype).removeprefix("torch.")) for dtype in seen]


def _flops(func: Any, name: str, args: tuple, output: Any) -> int:
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return int(formula(*args, out_val=output))
    # Each element of the result is a dot product over the last dimension of the first operand.
    return 2 * output.numel() * args[_MATMULS[name][0]].shape[-1]


def _attention_flops(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> int:
    """query: (B, H, S_q, D); key: (B, H_kv, S_k, D); value: (B, H_kv, S_k, D_v). flash-attn has heads after tokens; its
    varlen operators get sequences end to end, and the longest one's keys as their seventh argument."""
    keys = key.shape[-2] if not name.startswith("flash_attn") else rest[3] if "varlen" in name else key.shape[1]
    return 2 * query.shape[:-1].numel() * keys * (query.shape[-1] + value.shape[-1])
