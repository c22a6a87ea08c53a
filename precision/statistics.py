"""Statistics of one step: magnitudes, what a 16-bit format loses of them, agreement of gradients, drift of weights.

Nothing here waits for the device: everything stays a tensor until `to_plain`.

What a format loses: it stores magnitudes from its smallest normal number with full precision, those below it
(subnormals) with fewer and fewer bits, and rounds to zero whatever lies under half of its smallest subnormal, a tie
going to the even neighbour, zero (IEEE 754-2019, sections 3.3, 3.4, 4.3.1; for BF16 the 8 exponent bits of binary32 and
7 stored bits of significand, Intel 2018, "BFLOAT16 Hardware Numerics Definition").

|          | smallest normal     | smallest subnormal  | rounds to zero       |
| float16  | 2^-14  = 6.10e-05   | 2^-24  = 5.96e-08   | up to 2^-25          |
| bfloat16 | 2^-126 = 1.18e-38   | 2^-133 = 9.18e-41   | up to 2^-134         |
| float32  | 2^-126 = 1.18e-38   | 2^-149 = 1.40e-45   | up to 2^-150         |

Gradients have to be measured before they are rounded: in FP32, or in 16 bits of a wider range, times the loss scale.
FTZ, which some devices use for BF16, zeroes all subnormals: then the share below the smallest normal number is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from precision.activation_signals import unseen
from precision.findings import tensors_of
from precision.sampling import largest_of

NEGLIGIBLE = 1e-4
"""Gradients below this share of the others are rounding noise, such as those of a key's bias (softmax cancels it)."""
SIGNLESS = 1e-3
"""Values of a gradient below this share of its root mean square may have any sign in 16 bits: those of queries and keys
in one projection with the values, where attention is still nearly even."""

Named = Iterable[tuple[str, torch.Tensor]]


class Agreement(NamedTuple):
    """How a gradient compares with a reference; each a () float64 tensor."""

    cosine: torch.Tensor
    """Cosine of the angle between them, in [-1, 1]; 1 if both are zero, 0 if one is."""
    sign_agreement: torch.Tensor
    """Share of values with the same sign (+, - or zero), of those that have one: not below SIGNLESS of the root mean
    square of the reference."""
    relative_error: torch.Tensor
    """||gradient - reference|| / ||reference||; 0 if both are zero, inf if only the reference is."""


def compare_gradients(gradients: Named, reference: Named) -> dict[str, Agreement]:
    """Cosine, sign agreement and relative error of each gradient against the one of the same name.

    Computed in FP64. Raises KeyError if a name has no reference, ValueError if their shapes differ.
    """
    references = dict(reference)
    result = {}
    for name, gradient in gradients:
        if gradient.shape != references[name].shape:
            raise ValueError(f"{name}: shape {tuple(gradient.shape)}, reference {tuple(references[name].shape)}")
        mine, other = gradient.detach().double().reshape(-1), references[name].detach().double().reshape(-1)
        norms, difference = mine.norm() * other.norm(), (mine - other).norm()
        both_zero = (mine.norm() + other.norm()) == 0
        cosine = torch.where(norms == 0, both_zero.double(), (mine @ other) / norms)
        error = torch.where(both_zero, torch.zeros_like(difference), difference / other.norm())
        floor = SIGNLESS * other.square().mean().sqrt()
        noise = (other != 0) & (other.abs() < floor)
        same = ((mine.sign() == other.sign()) & ~noise).sum().double() / (~noise).sum()
        result[name] = Agreement(cosine.clamp(-1, 1), same, error)
    return result


class ActivationMeter:
    """Context manager: the largest magnitude in each module's outputs while it is entered.

    `maxima`: module name (class name for the whole model) to a () float32 tensor, over all calls inside; nan if any
    value is nan. A recomputation by activation checkpointing sees the same values again and changes nothing.
    unwatched: modules that get no hook.
    """

    def __init__(self, model: nn.Module, unwatched: Collection[nn.Module] = ()) -> None:
        without = set(unwatched)
        named = {module: name or type(model).__name__ for name, module in model.named_modules()}
        self._names = {module: name for module, name in named.items() if module not in without}
        self._handles: list[Any] = []
        self.names = tuple(self._names.values())
        """Modules that are watched, whether they are called or not."""
        self.maxima: dict[str, torch.Tensor] = {}

    def __enter__(self) -> ActivationMeter:
        self._handles = [module.register_forward_hook(self._measure, prepend=True) for module in self._names]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _measure(self, module: nn.Module, args: tuple, output: Any) -> None:
        name = self._names[module]
        for tensor in tensors_of(output):
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            with unseen(tensor.device.type):  # a recomputation takes another number of maxima
                largest = largest_of(tensor.detach())
                known = self.maxima.get(name)
                self.maxima[name] = largest if known is None else torch.maximum(known, largest)


def to_plain(measured: Any) -> Any:
    """`measured` with Python numbers for tensors and dicts for named tuples. Waits for the device.

    measured: mappings and named tuples, nested, of () or (n,) tensors and plain values.
    """
    if isinstance(measured, torch.Tensor):
        return measured.tolist()
    if isinstance(measured, Mapping):
        return {key: to_plain(item) for key, item in measured.items()}
    if isinstance(measured, tuple) and hasattr(measured, "_asdict"):
        return to_plain(measured._asdict())
    return measured
