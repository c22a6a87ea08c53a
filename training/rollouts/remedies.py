"""Remedies for a gap beyond its bound, which promotions apply as they do to `Regions`."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from precision.dtypes import DTYPES
from training.engine import Engine

CORRECTION = "grpo.correction"


class Remedies:
    """The head's dtype on both sides, and grpo.correction, which can change between two steps."""

    def __init__(self, engine: Engine, *copies: PreTrainedModel | None) -> None:
        """copies: models whose heads change with the trainer's; None for none."""
        self._objective: Any = engine.objective
        self._heads = [model.get_output_embeddings() for model in (engine.model, *copies) if model is not None]
        plain = all(type(head) is torch.nn.Linear for head in self._heads)  # not within an adapter
        own = {name: engine.compute for name, module in engine.model.named_modules() if module is self._heads[0]}
        self._start = own if plain else {}
        if hasattr(self._objective, "section"):
            self._start[CORRECTION] = self._objective.section.correction
        self.dtypes = dict(self._start)  # the current state of each remedy
        self.suspects: tuple[str, ...] = ()  # what may be promoted: all while the step's gap is beyond its bound

    def note(self, facts: dict[str, float]) -> dict[str, float]:
        """The metrics of a step's answers, with `gap/corrected` while the guard has changed the correction."""
        self.suspects = tuple(self.dtypes) if facts["gap/of_bound"] > 1 else ()
        corrected = self.dtypes.get(CORRECTION) != self._start.get(CORRECTION)
        return facts | {"gap/corrected": 1.0} if corrected else facts

    @property
    def head(self) -> str:
        """The head's dtype where the guard has changed it, as an ending of the version of answers; else empty."""
        return "".join(f" {name} {state}" for name, state in self.state_dict().items() if name != CORRECTION)

    def usual(self, name: str) -> str:
        """The config's state of a remedy."""
        return self._start[name]

    def set(self, name: str, state: str) -> None:
        """Change one remedy, on every rank alike."""
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
            self.set(name, state.get(name, start))


def _computed(head: torch.nn.Linear, dtype: torch.dtype, states: torch.Tensor) -> torch.Tensor:
    """Logits, computed and returned in `dtype` from the weights that the head has."""
    bias = None if head.bias is None else head.bias.to(dtype)
    return torch.nn.functional.linear(states.to(dtype), head.weight.to(dtype), bias)
