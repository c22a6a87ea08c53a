"""One update of drawn values of every parameter, recomputed in FP64 with the constants of the config.

Of this rank's part of each parameter some values in a row and the last one: master, state and reduced gradient are
copied before the step, and the optimizer's rule is applied to all that share its settings at once.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from config.schema import OptimizerSection
from training.engine import Engine
from training.engine.optimizer import IMPLEMENTATIONS
from training.engine.optimizers import adamw
from training.engine.optimizers.rule import UpdateInputs
from training.engine.tensors import Shard, local_gradient, shard_of, states_of, trainable_parameters
from training.self_check.passes import Row

_VALUES = 32
_WHOLE = ("lamb", "stable_adamw")
"""Optimizers with Adam's averages whose step depends on all of a parameter."""


@dataclass
class _Group:
    """Parameters that are updated alike."""

    names: list[str] = field(default_factory=list)
    shards: list[tuple[Shard, int]] = field(default_factory=list)
    before: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)


class Updates:
    """The values of one step. `before` it is applied, then `after`; neither is a collective."""

    def __init__(self, engine: Engine, section: OptimizerSection, *, seed: str) -> None:
        """seed: of what is drawn."""
        self._engine, self._section = engine, section
        self._draw = random.Random(f"{seed} {engine.world.rank}")
        self._groups: dict[tuple[float, float, bool], _Group] = defaultdict(_Group)
        self._states: dict[bool, tuple[str, ...]] = {}
        self.skipped: dict[str, str] = {}
        """What was not compared, and why."""

    @torch.no_grad()
    def before(self) -> None:
        """Copy what the step starts from. Call it with the reduced gradients there."""
        for name, parameter in trainable_parameters(self._engine).items():
            own: dict[str, Any] = self._engine.group_of[id(parameter)]
            if own["matrix"] and self._section.name == "muon":
                self.skipped["hidden matrices"] = "muon updates whole matrices"
                continue
            shard = shard_of(self._engine, parameter)
            gradient = local_gradient(parameter, shard, self._engine.stage) if shard is not None else None
            if shard is None or gradient is None:
                continue
            group = self._groups[own["weight_decay"], own["lr_factor"], own["matrix"]]
            at = self._draw.randrange(max(1, shard.length - _VALUES + 1))
            self._states[own["matrix"]] = states_of(self._engine, parameter)
            group.names.append(name)
            group.shards.append((shard, at))
            group.before.append(self._held(shard, at, own["matrix"]))
            group.gradients.append(_some(gradient, at).to(shard.flat.device, torch.float32))

    @torch.no_grad()
    def after(self, *, norm: float, scale: float, rate: float, step: int) -> list[Row]:
        """The largest error of each parameter, in units of its bound, over master and state.

        norm: of the unscaled gradient. scale: the loss scale of the step. rate: the schedule's. step: updates so far,
        this one included.
        """
        clipping, name = self._engine.clipping, self._section.name
        divided = scale * (max(1.0, (norm + 1e-6) / clipping) if clipping else 1.0)
        rows: list[Row] = []
        for (decay, factor, matrix), group in self._groups.items():
            kept = torch.stack(group.before, 1)
            given = UpdateInputs(
                kept[0],
                torch.stack(group.gradients).double() / divided,
                list(kept[1:]),
                section=self._section,
                weight_decay=decay,
                lr=rate * factor,
                step=step,
                matrix=matrix,
            )
            rule = adamw if name in (*_WHOLE, "muon") else IMPLEMENTATIONS[name]
            expected, slack = rule.after(given)  # type: ignore[attr-defined]
            found = torch.stack([self._held(*shard, matrix) for shard in group.shards], 1).double()
            first = 1 if name in _WHOLE else 0
            apart = (found - torch.stack(expected)).abs() / (torch.stack(slack) + torch.finfo(torch.float32).tiny)
            worst = apart[first:].nan_to_num(torch.inf).amax((0, 2)).tolist()
            rows += [Row("updates", name, value, 1.0) for name, value in zip(group.names, worst, strict=True)]
        if name in _WHOLE:
            self.skipped["masters"] = f"{name} scales its step by all of a parameter; its averages are compared"
        return rows

    def _held(self, shard: Shard, at: int, matrix: bool) -> torch.Tensor:
        """(1 + states, values) copies of master and state; of state that is not there yet zeros, as it starts."""
        length = min(_VALUES, shard.length)
        master = _filled(torch.cat([shard.master(at, length), shard.master(shard.length - 1, 1)]))
        states = shard.states(self._engine)
        held = [_some(states[key], at) if key in states else torch.zeros_like(master) for key in self._states[matrix]]
        return torch.stack([master, *held])


def _some(values: torch.Tensor, at: int) -> torch.Tensor:
    return _filled(torch.cat([values[at : at + _VALUES], values[-1:]]))


def _filled(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([values, values[-1:].expand(_VALUES + 1 - len(values))])
