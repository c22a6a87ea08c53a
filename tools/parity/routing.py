"""The experts that routers choose, so that a run's gradients are compared with those for the same choices.

Near a tie, rounding decides which expert a token goes to, and the choice in 16 bits is as valid as that in FP32. Yet
one token of 512 routed differently changes the experts' gradients by 4%, in FP16 16 times as much as rounding does.
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
    """One call of `topk` in a router, each (tokens, ...)."""

    given: torch.Tensor
    """Values to choose from."""
    indices: torch.Tensor


Choices = dict[str, list[Choice]]
"""Choices by router, in the order of its calls."""


@contextmanager
def choosing(model: torch.nn.Module, made: Choices, taken: Mapping[str, list[Choice]] | None = None) -> Iterator[None]:
    """Context manager: choices of the model's routers are added to `made`. taken: choices to use instead."""
    own = torch.topk

    def topk(given: torch.Tensor, k: int, dim: int = -1, *args: Any, **options: Any) -> Any:
        found = own(given, k, dim, *args, **options)
        if inside:
            known = made.setdefault(inside[-1], [])
            if taken is not None:
                indices = taken[inside[-1]][len(known)].indices
                found = torch.return_types.topk((given.gather(dim, indices), indices))
            known.append(Choice(given.detach(), found.indices))
        return found

    with (
        running(model, is_router) as inside,
        patch.object(torch, "topk", topk),
        patch.object(torch.Tensor, "topk", topk),
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
    """1 if a run chose other experts than the reference, 0 if the same ones; nan if its choices cannot be used: it made
    other calls, or did not choose the largest of its own scores.

    Whether the scores themselves are right is judged by the outputs of the routers and of the modules before them.
    """
    other = 0.0
    for name, choices in run.items():
        if len(choices) != len(reference.get(name, ())):
            return math.nan
        for own, expected in zip(choices, reference[name], strict=True):
            best = own.given.topk(own.indices.shape[-1]).values
            if not torch.equal(own.given.gather(-1, own.indices).sort(descending=True).values, best):
                return math.nan
            if not torch.equal(own.indices.sort().values, expected.indices.sort().values):
                other = 1.0
    return other
