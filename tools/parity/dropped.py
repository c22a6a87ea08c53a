"""Compares which modules drop values in training, and how many, with the architecture's own code.

Compared are the rate passed to a dropout function, and the share of its values that became zero: a rate other than the
declared one, or missing dropout, changes training but no evaluation loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tools.parity.routing import running

_SURE = 6.0
"""Number of standard errors beyond which chance is no explanation."""
_DROPOUTS: tuple[Any, ...] = (functional.dropout, functional.alpha_dropout, torch.dropout, torch.alpha_dropout)
_ATTENTION: Any = functional.scaled_dot_product_attention


class Rate(NamedTuple):
    """Dropout of one module, over all of its calls."""

    asked: float
    zeros: int
    values: int
    """Values that were not zero before; 0 for attention, whose weights stay inside its kernel."""


class _Rates(TorchFunctionMode):
    """Records the dropout functions called inside it, by the calling module."""

    def __init__(self, inside: Sequence[str]) -> None:
        """inside: names of the modules that are running, the innermost last."""
        super().__init__()
        self._inside = inside
        self.found: defaultdict[tuple[str, float], list[int]] = defaultdict(lambda: [0, 0])

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = dict(zip(("input", "p", "train"), args, strict=False)) | kwargs
        there = given["input"] != 0 if function in _DROPOUTS else None  # before it may be overwritten
        output = function(*args, **kwargs)
        if there is not None:
            if given.get("training", given.get("train", True)) and (asked := float(given.get("p", 0.5))):
                self._add(asked, int((there & (output == 0)).sum()), int(there.sum()))
        elif function is _ATTENTION and (asked := float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))):
            self._add(asked, 0, 0)
        return output

    def _add(self, asked: float, zeros: int, values: int) -> None:
        counts = self.found[self._inside[-1] if self._inside else "", asked]
        counts[0] += zeros
        counts[1] += values


def rates(model: torch.nn.Module, score: Callable[[], object]) -> dict[str, Rate]:
    """The rate of each module that drops values while `score` passes a batch through the model, in training mode."""
    model.train()
    with torch.no_grad(), running(model, lambda module: True) as inside, _Rates(inside) as seen:
        score()
    return {name: Rate(asked, *counts) for (name, asked), counts in seen.found.items()}


def otherwise(own: Mapping[str, Rate], declared: Mapping[str, Rate]) -> dict[str, str]:
    """Modules that drop another share than they should, to what they do. own: the run's; declared: the reference's."""
    found = {}
    for name in dict.fromkeys([*declared, *own]):
        mine, expected = own.get(name), declared.get(name)
        if mine is None or expected is None:
            found[name] = "drops nothing" if mine is None else f"drops {mine.asked:g} where nothing is dropped"
            continue
        n, p = mine.values, expected.asked
        share = mine.zeros / n if n else mine.asked
        if mine.asked != p or abs(share - p) > _SURE * (p * (1 - p) / max(n, 1)) ** 0.5:
            found[name] = f"drops {mine.asked:g} (measured {share:.4g} of {n} values), declared is {p:g}"
    return found
