"""Descriptions of tensors that are not finite, and a walk over the tensors in a module's arguments and outputs.

Kinds: IEEE 754 makes nan out of inf (inf - inf, 0 * inf, inf / inf) and never inf out of nan. A tensor that holds both
saw inf first, so it is reported as "inf"; "nan" means nan and no inf.

A tensor of zeros and -inf is an additive attention mask, not an error.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any, Literal

import torch

LOSS = "loss"
"""`Finding.module` for what is computed after the model: the loss itself, or its gradient entering the model."""
MOST_FINDINGS = 5
"""Most findings that are kept of each kind: the first cause, and a few others that do not follow from it."""

Kind = Literal["inf", "nan"]
What = Literal["activation", "gradient", "parameter", "loss"]
Description = tuple[Kind, int, float | None, str]
"""Kind, number of non-finite values, largest finite magnitude, dtype."""


@dataclass(frozen=True)
class Finding:
    """One tensor that is not finite although everything it was computed from is."""

    module: str
    """Module name as in named_modules(), the class name for the whole model, the full name of a parameter (also for a
    parameter's gradient), or LOSS."""
    tensor: What
    """The tensor's role: an output or intermediate of the module, a gradient from its backward, a weight, the loss."""
    kind: Kind
    """inf if the tensor holds any inf, else nan."""
    count: int
    """Values that are not finite in that tensor, on this rank."""
    largest_finite: float | None
    """Largest magnitude among its finite values and, for an FP16 activation, among those it was computed from: its
    module's inputs and the outputs of the modules inside it. None if there is none."""
    dtype: str
    order: int
    """0 for the first cause, then in the order of discovery."""
    micro_batch: int = 0
    """Index of the forward pass since the Inspector was entered, from 0."""
    seen: str = ""
    """Where the tensor was seen, human-readable."""

    @property
    def overflowed(self) -> bool:
        """Whether a forward pass exceeded FP16's largest number, which no loss scale can prevent."""
        return self.tensor == "activation" and self.kind == "inf" and self.dtype == "float16"


def describe(tensor: torch.Tensor) -> Description | None:
    """`Description` of a tensor; None if all of it is finite, as in integer and meta tensors. Waits for the device."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_meta:
        return None
    values = tensor.detach() if tensor.element_size() > 1 else tensor.detach().float()  # float8 has no isfinite
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return None
    count = values.numel() - int(finite.sum())
    kind: Kind = "inf" if bool(torch.isinf(values).any()) else "nan"
    largest = float(torch.where(finite, values, 0.0).abs().max()) if count < values.numel() else None
    return kind, count, largest, str(tensor.dtype).removeprefix("torch.")


def largest_half(tensors: Iterable[torch.Tensor]) -> float:
    """Largest finite magnitude in the tensors that are FP16; 0 if none is."""
    halves = (tensor.detach() for tensor in tensors if tensor.dtype == torch.float16 and tensor.numel())
    return max((float(values.nan_to_num(0.0, 0.0, 0.0).abs().max()) for values in halves), default=0.0)


def check_parameters(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> list[Finding]:
    """Up to MOST_FINDINGS findings of tensors (weights or masters, by full name) that are not finite, in order."""
    described = ((name, describe(tensor)) for name, tensor in named_tensors)
    bad = islice(((name, found) for name, found in described if found), MOST_FINDINGS)
    return [Finding(name, "parameter", *found, order) for order, (name, found) in enumerate(bad)]


def first_bad(tensors: Iterable[torch.Tensor]) -> Description | None:
    """`describe` of the first tensor that is neither finite nor an additive attention mask."""
    for tensor in tensors:
        if found := describe(tensor):
            zero = tensor == 0
            if not zero.any() or not (zero | (tensor == -torch.inf)).all():
                return found
    return None


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a tensor, tuple, list, mapping (ModelOutput is one) or dataclass, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from tensors_of(getattr(value, part.name))


def replace_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` applied to its tensors. Containers that a callee might write into are left as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is tuple:
        return tuple(replace_tensors(item, change) for item in value)
    return value


def in_backward() -> bool:
    """Whether autograd is running on this thread, which calls modules to recompute their outputs."""
    return torch._C._current_graph_task_id() != -1
