"""Statistics of one step: magnitudes, agreement of gradients, drift of weights.

Nothing here waits for the device: everything stays a tensor until `to_plain`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from precision.activation_signals import OutputMeter, unseen
from precision.findings import tensors_of
from precision.sampling import largest_of

NEGLIGIBLE = 1e-4
"""Gradients below this share of the others are rounding noise, such as that of a key bias, which softmax cancels."""
SIGNLESS = 1e-3
"""Values of a gradient below this share of its root mean square may have any sign in 16 bits: those of queries and keys
in a fused projection while attention is still nearly uniform."""
PART = 1 << 20
"""Number of values copied to FP64 at a time; a whole embedding would take gigabytes."""

Named = Iterable[tuple[str, torch.Tensor]]


class Agreement(NamedTuple):
    """How a gradient compares with a reference; each a () float64 tensor."""

    cosine: torch.Tensor
    """Cosine of the angle between them, in [-1, 1]; 1 if both are zero, 0 if one is."""
    sign_agreement: torch.Tensor
    """Share of values with the same sign (+, - or zero) among those that have one: not below SIGNLESS times the root
    mean square of the reference."""
    relative_error: torch.Tensor
    """||gradient - reference|| / ||reference||; 0 if both are zero, inf if only the reference is."""


def compare_gradients(gradients: Named, reference: Named) -> dict[str, Agreement]:
    """Cosine, sign agreement and relative error, in FP64, of each gradient against the one of the same name."""
    result, references = {}, dict(reference)
    for name, gradient in gradients:
        if gradient.shape != references[name].shape:
            raise ValueError(f"{name}: shape {tuple(gradient.shape)}, reference {tuple(references[name].shape)}")
        pair = gradient, references[name]
        squares = [torch.stack([a @ a, b @ b, a @ b, (a - b) @ (a - b)]) for a, b in in_fp64(*pair)]
        mine, other, along, difference = torch.stack(squares).sum(0)
        both_zero, floor = mine + other == 0, SIGNLESS * (other / gradient.numel()).sqrt()
        cosine = torch.where(mine * other == 0, both_zero.double(), along / (mine.sqrt() * other.sqrt()))
        error = torch.where(both_zero, torch.zeros_like(difference), (difference / other).sqrt())
        signs = [((b == 0) | (b.abs() >= floor), a.sign() == b.sign()) for a, b in in_fp64(*pair)]
        same = sum((has & alike).sum().double() for has, alike in signs) / sum(has.sum() for has, _ in signs)
        result[name] = Agreement(cosine.clamp(-1, 1), same, error)
    return result


def in_fp64(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Flat FP64 copies of tensors of one size, PART values at a time."""
    for parts in zip(*(tensor.detach().reshape(-1).split(PART) for tensor in tensors), strict=True):
        yield [part.double() for part in parts]


class ActivationMeter(OutputMeter):
    """Context manager: `maxima` maps a module name to its outputs' largest magnitude, () float32; nan if any value is.
    The whole model goes by its class name. unwatched: modules that get no hook."""

    def __init__(self, model: nn.Module, unwatched: Collection[nn.Module] = ()) -> None:
        without = set(unwatched)
        named = {name or type(model).__name__: module for name, module in model.named_modules()}
        super().__init__({name: module for name, module in named.items() if module not in without})
        self.names = tuple(self._modules)
        """Modules that are watched, whether they are called or not."""
        self.maxima: dict[str, torch.Tensor] = {}

    def _measure(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        for tensor in tensors_of(output):
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            with unseen(tensor.device.type):  # a recomputation calls maximum a different number of times
                largest = largest_of(tensor.detach())
                known = self.maxima.get(name)
                self.maxima[name] = largest if known is None else torch.maximum(known, largest)


def to_plain(measured: Any) -> Any:
    """Nested mappings and named tuples, with tensors as Python numbers and named tuples as dicts; a device sync."""
    if isinstance(measured, torch.Tensor):
        return measured.tolist()
    if isinstance(measured, Mapping):
        return {key: to_plain(item) for key, item in measured.items()}
    if isinstance(measured, tuple) and hasattr(measured, "_asdict"):
        return to_plain(measured._asdict())
    return measured
