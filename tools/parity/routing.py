"""The choices that a model's code makes, so that a run's gradients are compared with those for the same choices.

Near a tie, rounding decides which expert a token goes to, and near zero, which units of a ReLU are on: a choice in 16
bits is as valid as that in FP32. Yet one token of 512 routed differently changes the experts' gradients by 4%, in FP16
16 times as much as rounding does, and one unit of a ReLU that is on makes them 4 times as far off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from precision.manifest import is_router


class Choice(NamedTuple):
    """One call of `topk` in a router, each (tokens, ...), or of a ReLU."""

    given: torch.Tensor
    """Values to choose from; of a ReLU its choice."""
    indices: torch.Tensor
    """Indices of the chosen experts; of a ReLU, where its input is positive."""


Choices = dict[str, list[Choice]]
"""Choices by module, in the order of its calls."""


@contextmanager
def choosing(model: torch.nn.Module, made: Choices, taken: Mapping[str, list[Choice]] | None = None) -> Iterator[None]:
    """Context manager: choices of the model's routers and ReLUs are added to `made`. taken: choices to use instead."""
    own, own_relu = torch.topk, torch.nn.functional.relu

    def topk(given: torch.Tensor, k: int, dim: int = -1, *args: Any, **options: Any) -> Any:
        found = own(given, k, dim, *args, **options)
        if inside:
            known = made.setdefault(inside[-1], [])
            if taken is not None:
                indices = taken[inside[-1]][len(known)].indices
                found = torch.return_types.topk((given.gather(dim, indices), indices))
            known.append(Choice(given.detach(), found.indices))
        return found

    def relu(given: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        if not inside:
            return own_relu(given, inplace)
        known = made.setdefault(inside[-1], [])
        on = given > 0 if taken is None else taken[inside[-1]][len(known)].indices
        known.append(Choice(on, on))
        return own_relu(given, inplace) if taken is None else torch.where(on, given, 0.0)

    with (
        running(model, lambda module: is_router(module) or type(module) is torch.nn.ReLU) as inside,
        patch.object(torch, "topk", topk),
        patch.object(torch.Tensor, "topk", topk),
        patch.object(torch.nn.functional, "relu", relu),
    ):
        yield


@contextmanager
def running(model: torch.nn.Module, watched: Callable[[torch.nn.Module], bool]) -> Iterator[list[str]]:
    """Context manager: the names of the watched modules whose forward pass is under way, the innermost last."""
    inside: list[str] = []

    def enter(name: str, module: torch.nn.Module, args: Any) -> None:
        inside.append(name)

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        inside.pop()

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if watched(module):
                stack.enter_context(module.register_forward_pre_hook(partial(enter, name)))
                # first, since other hooks may call routers of a reference
                stack.enter_context(module.register_forward_hook(leave, prepend=True, always_call=True))
        yield inside


def differ(run: Choices, reference: Choices) -> float:
    """1 if a run chose otherwise than the reference, 0 if the same; nan if its choices cannot be used: it made other
    calls or has only a rank's slice, or its routers did not choose the largest of their own scores.

    Whether what they chose by is right is judged by the outputs of routers, and of the modules before them.
    """
    other = 0.0
    for name, choices in run.items():
        if len(choices) != len(reference.get(name, ())):
            return math.nan
        for own, expected in zip(choices, reference[name], strict=True):
            if own.indices.shape != expected.indices.shape:
                return math.nan
            if own.indices.dtype is torch.bool:
                other = max(other, float(not torch.equal(own.indices, expected.indices)))
                continue
            best = own.given.topk(own.indices.shape[-1]).values
            if not torch.equal(own.given.gather(-1, own.indices).sort(descending=True).values, best):
                return math.nan
            if not torch.equal(own.indices.sort().values, expected.indices.sort().values):
                other = 1.0
    return other
