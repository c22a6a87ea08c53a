"""The largest values that a 16-bit run stores: every module's inputs and outputs, their gradients, and weights.

No loss scale helps if a stored activation exceeds FP16's largest number, and one token is enough: "massive activations"
(Sun et al. 2024) occur at single tokens, often the first, which histograms of regions do not show. So each largest
value is kept with its module and token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from precision.findings import tensors_of

_MASKED = 1e37
"""Magnitudes from this on are those of attention masks: minus infinity or the lowest number of a dtype."""


@dataclass(frozen=True)
class Peak:
    """The largest magnitude of a module's tensors of one kind, in FP32 and without a loss scale."""

    value: float
    place: str
    """Full name of the module or parameter, preceded by `input of` if the module did not produce the value."""
    position: int | None = None
    """[tokens] Distance from the start of its document; None if the value does not belong to one token."""
    token: str | None = None

    def __str__(self) -> str:
        where = "" if self.position is None else f", token {self.token!r}, position {self.position}"
        return f"{self.value:,.6g} at {self.place}{where}"


Stored = dict[str, dict[str, Peak]]
"""Kind (activations, gradients, weights, weight_gradients) to name of a module or parameter to its peak."""


def largest(stored: Stored, *kinds: str) -> Peak:
    """The largest peak of these kinds, the first of equal ones: the module that produced what others read."""
    peaks = (peak for kind in kinds for peak in stored.get(kind, {}).values())
    return max(peaks, key=lambda peak: peak.value, default=Peak(0.0, "nothing"))


def first_beyond(stored: Stored, limit: float) -> Peak | None:
    """The first activation in the order of the forward pass, or weight, whose magnitude exceeds a limit."""
    peaks = (peak for kind in ("activations", "weights") for peak in stored.get(kind, {}).values())
    return next((peak for peak in peaks if peak.value > limit), None)


def largest_of_each(measured: Iterable[Stored]) -> Stored:
    """The largest of each kind and name over ranks or points."""
    found: Stored = {}
    for stored in measured:
        for kind, peaks in stored.items():
            into = found.setdefault(kind, {})
            into |= {name: peak for name, peak in peaks.items() if name not in into or peak.value > into[name].value}
    return found


class StoredPeaks:
    """Context manager around forward and backward passes: `found` has the peaks of this rank."""

    def __init__(self, model: torch.nn.Module, text_of: Callable[[int], str]) -> None:
        """text_of: the text of a token."""
        self.found: Stored = {}
        self._model, self._text_of = model, text_of
        self._inputs: dict[str, torch.Tensor] = {}
        self._exit = ExitStack()

    def __enter__(self) -> StoredPeaks:
        keep = self._exit.enter_context
        keep(self._model.register_forward_pre_hook(self._remember, with_kwargs=True))
        for name, module in self._model.named_modules():
            # Before the forward pass, when ZeRO-3 has gathered the weights and not yet released them.
            keep(module.register_forward_pre_hook(partial(self._weights, name)))
            keep(module.register_forward_hook(partial(self._passed, name), with_kwargs=True))
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                keep(parameter.register_hook(partial(self._record, "weight_gradients", name, name)))
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def _remember(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._inputs = {name: value for name, value in kwargs.items() if name.endswith(("input_ids", "position_ids"))}

    def _weights(self, name: str, module: torch.nn.Module, args: Any) -> None:
        for own, parameter in module.named_parameters(name, recurse=False):
            self._record("weights", own, own, parameter)

    def _passed(self, name: str, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        name = name or type(module).__name__
        given = {key: value for key, value in kwargs.items() if "mask" not in key}
        for place, tensors in ((f"input of {name}", tensors_of((args, given))), (name, tensors_of(output))):
            for tensor in tensors:
                self._record("activations", name, place, tensor)
                if tensor.requires_grad and tensor.is_floating_point():
                    tensor.register_hook(partial(self._record, "gradients", name, place))

    @torch.no_grad()
    def _record(self, kind: str, name: str, place: str, values: torch.Tensor) -> None:
        if not values.is_floating_point() or not values.numel():
            return
        magnitudes = values.detach().abs().flatten()
        value, index = torch.where(magnitudes < _MASKED, magnitudes, 0.0).max(0)
        known = self.found.setdefault(kind, {})
        if name not in known or float(value) > known[name].value:
            known[name] = Peak(float(value), place, *self._token(values.shape, int(index)))

    def _token(self, shape: torch.Size, index: int) -> tuple[int | None, str | None]:
        """Position and text of the token that a value belongs to. index: into the flattened tensor."""
        for ids in (value for key, value in self._inputs.items() if key.endswith("input_ids")):
            if shape[:2] == ids.shape or shape[:1].numel() == ids.numel():
                place = index * ids.numel() // shape.numel()
                positions = self._inputs.get("position_ids", ids)
                known = positions is not ids and positions.shape == ids.shape
                position = int(positions.flatten()[place]) if known else place % ids.shape[-1]
                return position, self._text_of(int(ids.flatten()[place]))
        return None, None
