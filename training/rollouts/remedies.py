"""Remedies for a gap beyond its bound: the head in FP32 on both sides, or masking of tokens.

The class implements the part of `Regions` that promotions use, so they share probation, checkpoints and rollbacks.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from precision.dtypes import DTYPES
from precision.regions import own_parameters_in
from training.engine import Engine

CORRECTION = "grpo.correction"


class Remedies:
    """The head's dtype and the correction, as regions that can be changed between two steps."""

    def __init__(self, engine: Engine, copies: Sequence[PreTrainedModel]) -> None:
        """copies: models whose heads change with the trainer's."""
        self._objective: Any = engine.objective
        self._heads = [model.get_output_embeddings() for model in (engine.model, *copies)]
        names = {id(module): name for name, module in engine.model.named_modules()}
        plain = all(type(head) is torch.nn.Linear for head in self._heads)  # not within an adapter
        self._start = {names[id(self._heads[0])]: engine.compute} if plain else {}
        if hasattr(self._objective, "section"):
            self._start[CORRECTION] = self._objective.section.correction
        self.dtypes = dict(self._start)
        """Current state of each remedy, by name."""
        self.suspects: tuple[str, ...] = ()
        """Names to promote although no module is known as the cause, set while a step's gap is beyond its bound."""

    def note(self, facts: dict[str, float]) -> dict[str, float]:
        """Metrics of a step's answers; `gap/corrected` is added while the guard has tokens masked."""
        self.suspects = tuple(self.dtypes) if facts["gap/of_bound"] > 1 else ()
        corrected = self.dtypes.get(CORRECTION) != self._start.get(CORRECTION)
        return facts | {"gap/corrected": 1.0} if corrected else facts

    def set(self, name: str, state: str, reason: str) -> None:
        """Change one remedy. Every rank has to call it."""
        self.dtypes[name] = state
        if name == CORRECTION:
            self._objective.section = replace(self._objective.section, correction=state)
            return
        for head in self._heads:
            head.__dict__.pop("forward", None)
            if state != self._start[name]:
                head.forward = partial(_computed, head, DTYPES[state])

    def state_dict(self) -> dict[str, str]:
        """States that differ from the config's."""
        return {name: now for name, now in self.dtypes.items() if now != self._start[name]}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """The inverse of `state_dict`."""
        for name, start in self._start.items():
            self.set(name, state.get(name, start), "resumed")


def _computed(head: torch.nn.Module, dtype: torch.dtype, states: torch.Tensor) -> torch.Tensor:
    """Logits, computed and returned in `dtype` from the weights that the head has."""
    with own_parameters_in(head, dtype):
        return torch.nn.functional.linear(states.to(dtype), head.weight, head.bias)  # type: ignore[arg-type]
