"""The `faults:` of kind flipped_bit that strike what a rank holds: weights, masters, moments, reduced gradients."""

from __future__ import annotations

from typing import Any

import torch

from config.schema import Fault
from training.engine.engine import Engine
from training.engine.flips import flip_bit
from training.engine.tensors import local_gradient, shard_of


def tell_faults(engine: Engine) -> None:
    """Let the engine's faults reach what this rank holds of a parameter."""
    engine.faults.flip = lambda fault, parameter, stuck_at: flip_held(engine, fault, parameter, stuck_at)


@torch.no_grad()
def flip_held(engine: Engine, fault: Fault, parameter: Any, stuck_at: bool | None = None) -> bool | None:
    """Flip the bit in the middle of this rank's part of the parameter's tensor; of a weight that is whole, of all.

    stuck_at: set it to this instead. Returns what it is now; None where this rank holds none: of a part of other ranks,
    of a moment before the first update, of a second one that the optimizer does not keep.
    """
    if fault.place == "weight":
        held = parameter.ds_tensor.data if engine.stage == 3 and not parameter.numel() else parameter.data
        return flip_bit(held, held.numel() // 2, fault.bit, stuck_at=stuck_at)
    shard = shard_of(engine, parameter)
    if shard is None:
        return None
    if fault.place == "collective":
        found = local_gradient(parameter, shard, engine.stage)
    elif fault.place == "master":
        found = shard.of(shard.flat)
    else:
        states = list(shard.states(engine).values())
        found = next(iter(states[fault.place == "second_moment" :]), None)
    if found is None:
        return None
    return flip_bit(found, len(found) // 2, fault.bit, stuck_at=stuck_at)
