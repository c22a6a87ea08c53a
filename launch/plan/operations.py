"""Record the operators of one micro-batch: FLOPs, bytes of operands, and which of them a kernel could fuse."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

HEAD = "head"
"""Scope of the module that produces logits, and of everything after it."""
_MAKES_NOTHING = ("empty", "new_empty", "detach", "alias", "set_", "_local_scalar", "lift_fresh", "resize_")
"""Name prefixes of operators that touch no values."""
_ONLY_WRITES = ("aten::copy_", "aten::zero_", "aten::fill_")
"""Operators that do not read what they overwrite."""
_PICKS = {
    "aten::embedding": 0,
    "aten::gather": 0,
    "aten::scatter_add_": 0,
    "aten::nll_loss_forward": 0,
    "aten::nll_loss_backward": 1,
}
"""Operators that touch only some values of an operand, to the position of that operand."""


@dataclass(frozen=True)
class Operation:
    """One operator, computed by one kernel."""

    kind: str
    """matmul, attention or other."""
    scope: str
    """Innermost part of the model it is in: Norm, attention, MLP, block or outside."""
    backward: bool
    flops: float
    """[FLOP] Cost; causal attention counts without the masked half."""
    reads: dict[int, float]
    """Storage to the number of bytes read from it."""
    writes: dict[int, float]

    @property
    def bytes(self) -> float:
        """[bytes] Size of all operands, each counted once."""
        return sum(self.reads.values()) + sum(self.writes.values())


class Log:
    """Operators in execution order, excluding the head and everything after it."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.backward = False
        """Whether the backward pass is running."""
        self._starts: list[int] = [0]
        self._scopes: list[str] = ["outside"]
        self._held: dict[int, Any] = {}

    def enter(self, scope: str) -> None:
        """Set the scope of operators from now on, and of the backward operators of the nodes they create."""
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._scopes.append(scope)

    def run_backward(self, output: Any) -> None:
        """Run the backward pass of a model's output; clears all operators if its code needs values."""
        found = getattr(output, "logits", output)
        self.backward = True
        try:
            found.backward(torch.empty_like(found))
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):
            self.operations.clear()
        finally:
            self._held.clear()

    def add(self, function: Any, given: Sequence[Any], options: dict[str, Any], result: Any) -> float:
        """Record a torch operator that has run; returns its FLOPs."""
        name = function._schema.name
        if function.is_view or name.removeprefix("aten::").startswith(_MAKES_NOTHING) or name.startswith("prim::"):
            return 0.0
        arguments = [item for item in pytree.tree_leaves((given, options)) if isinstance(item, torch.Tensor)]
        made = [item for item in pytree.tree_leaves(result) if isinstance(item, torch.Tensor)]
        overwrites = name.endswith("_") or function._schema.is_mutable
        known = {item.untyped_storage()._cdata for item in arguments}
        if not overwrites and made and all(item.untyped_storage()._cdata in known for item in made):
            return 0.0  # a view under another name
        if name in _PICKS:
            table = arguments.pop(_PICKS[name]).untyped_storage()._cdata
            made = [item for item in made if item.untyped_storage()._cdata != table]
            if name == "aten::embedding":  # reads only the rows it returns
                arguments += made
        packet = function._overloadpacket
        count = flop_registry.get(getattr(torch.ops.aten, packet.__name__.rstrip("_"), packet))
        flops = float(count(*given, **options, out_val=result)) if count else 0.0
        read = arguments[1:] if name in _ONLY_WRITES else arguments
        self.note("matmul" if flops else "other", flops, read, made)
        return flops

    def note(self, kind: str, flops: float, read: Iterable[Any], written: Iterable[Any]) -> None:
        node = torch._C._current_autograd_node() if self.backward else None
        scope = self._scopes[-1 if node is None else bisect_right(self._starts, node._sequence_nr()) - 1]
        reads, writes = self._sizes(read), self._sizes(written)
        if scope != HEAD:
            self.operations.append(Operation(kind, scope, self.backward, flops, reads, writes))

    def _sizes(self, tensors: Iterable[Any]) -> dict[int, float]:
        found: dict[int, float] = {}
        for tensor in tensors:
            if tensor is not None:
                storage = tensor.untyped_storage()
                self._held[storage._cdata] = storage  # so that its address is not reused
                size = min(tensor.numel() * tensor.element_size(), storage.nbytes())
                found[storage._cdata] = min(found.get(storage._cdata, 0) + size, storage.nbytes())
        return found


def fused(operations: Sequence[Operation], key: Callable[[Operation], Any]) -> list[Operation]:
    """Fuse neighbouring operators with the same `key` into one kernel, except matmuls and attention.

    A fused kernel reads each input once and writes what later operators read. Forward results that only fused backward
    kernels read are not written, but recomputed from the inputs. key: None for operators that are not fused.
    """
    keys = [None if one.kind != "other" else key(one) for one in operations]
    last_read: dict[int, int] = {}
    last_needed: dict[int, int] = {}
    for at, one in enumerate(operations):
        last_read |= dict.fromkeys(one.reads, at)
        last_needed |= {} if one.backward and keys[at] is not None else dict.fromkeys(one.reads, at)
    sources: dict[int, dict[int, float]] = {}
    found: list[Operation] = []

    def one_kernel(group: Sequence[Operation], end: int) -> Operation:
        inputs: dict[int, float] = {}
        made: dict[int, float] = {}
        for one in group:
            for storage, size in one.reads.items():
                known = sources.get(storage, {storage: size})
                inputs |= {each: of for each, of in known.items() if each not in made | inputs}
            made |= one.writes
        last = last_read if group[0].backward else last_needed
        kept = {storage: size for storage, size in made.items() if last.get(storage, -1) >= end}
        sources.update(dict.fromkeys(made.keys() - kept.keys(), inputs))
        return replace(group[0], reads=inputs, writes=kept)

    start = 0
    for at in range(1, len(operations) + 1):
        one = operations[start]
        if keys[start] is None:
            found.append(one)
        elif at < len(operations) and (keys[at], operations[at].backward) == (keys[start], one.backward):
            continue
        else:
            found.append(one_kernel(operations[start:at], at))
        start = at
    return found
