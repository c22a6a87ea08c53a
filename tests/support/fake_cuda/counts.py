"""Counts what a step does to a device: host waits, blocking copies, drains of the device, and collectives, by place."""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_SELF = str(Path(__file__).parent)
_COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "barrier": "barrier",
}
"""Operators of torch.distributed, as its dispatcher names them."""


class Counts:
    """Operations counted while `counting` was entered."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        """kind and place to how often: item, copy, synchronize, pageable."""
        self.collectives: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        """Kind of collective to the bytes of its larger side on this rank."""
        self.operators: Counter[str] = Counter()
        """Operators of aten by name, on tensors of either device."""
        self._on = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Forget what was counted before, and count inside."""
        for counter in (self.waits, self.collectives, self.bytes, self.operators):
            counter.clear()
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def wait(self, kind: str) -> None:
        """The host waits for the device here."""
        if self._on:
            self.waits[f"{kind} {_place()}"] += 1

    def operator(self, name: str) -> None:
        """An operator is called."""
        if self._on:
            self.operators[name] += 1

    def collective(self, kind: str, size: int) -> None:
        """A collective whose larger side has `size` bytes."""
        if self._on:
            self.collectives[kind] += 1
            self.bytes[kind] += size


def _place() -> str:
    """file:function of the innermost frame outside of torch, DeepSpeed's accelerator and this folder."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and "/deepspeed/accelerator/" not in path and not path.startswith((_SELF, "<")):
            return f"{'/'.join(Path(path).parts[-2:])}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


class Device(TorchDispatchMode):
    """Above FakeTensorMode: counts copies and collectives, and lets what has values keep them."""

    def __init__(self, counts: Counts, pinned: Collection[int]) -> None:
        super().__init__()
        self._counts, self._pinned = counts, pinned

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function.name().partition("::")[2].partition(".")[0]
        if function.namespace == "c10d" and name in _COLLECTIVES:
            self._counts.collective(_COLLECTIVES[name], max(map(_bytes, args), default=0))
            return function(*args, **kwargs)
        if function.namespace == "aten":
            self._counts.operator(name)
        if name in ("_to_copy", "copy_"):
            self._copy(name, args, kwargs)
        elif _of_host_only(args, kwargs):
            with _disable_current_modes():  # a batch that the loader's thread has read
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    def _copy(self, name: str, args: Any, kwargs: Any) -> None:
        source = args[0] if name == "_to_copy" else args[1]
        target = torch.device(kwargs.get("device") or source.device) if name == "_to_copy" else args[0].device
        if target.type == source.device.type:
            return
        unblocked = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
        if not unblocked:
            self._counts.wait("copy")
        elif target.type == "cuda" and source.untyped_storage()._cdata not in self._pinned:
            self._counts.wait("pageable")


def _of_host_only(args: Any, kwargs: Any) -> bool:
    """Whether all tensors among the arguments have values, and the result will have as well."""
    given = [*args, *(value for values in args if isinstance(values, (list, tuple)) for value in values)]
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    real = bool(tensors) and not any(isinstance(value, FakeTensor) or value.is_meta for value in tensors)
    return real and torch.device(kwargs.get("device") or "cpu").type == "cpu"


def answer_without_values(counts: Counts) -> None:
    """Let FakeTensorMode answer what depends on values: 1, False, equal, no element; on a GPU the host would wait."""

    def answered(answer: Callable[..., Any]) -> Callable[..., Any]:
        def implementation(mode: Any, function: Any, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if values.is_cuda:
                counts.wait("item")
            return answer(values, *args, **kwargs)

        return implementation

    def one(values: Any) -> float | int | bool:
        if values.constant is not None:
            with _disable_current_modes():
                constant: float | int | bool = values.constant.item()
                return constant
        return False if values.dtype == torch.bool else 1.0 if values.is_floating_point() else 1

    def bins(values: torch.Tensor, weights: Any = None, minlength: int = 0) -> torch.Tensor:
        return values.new_empty(max(minlength, 1), dtype=torch.int64 if weights is None else weights.dtype)

    aten = torch.ops.aten
    fake_impls.op_implementations_dict |= {
        aten.item.default: answered(one),
        aten._local_scalar_dense.default: answered(one),
        aten.equal.default: answered(lambda values, other: True),
        aten.allclose.default: answered(lambda values, *args, **kwargs: True),
        aten.nonzero.default: answered(lambda values: values.new_empty((0, values.dim()), dtype=torch.int64)),
        aten.masked_select.default: answered(lambda values, mask: values.new_empty(0)),
        aten.bincount.default: answered(bins),
        aten._fused_sgd_.default: lambda *given, **options: None,  # in place, and without a rule for fake tensors
    }
