"""Guarantee 1: before a token is sampled, what the sampler computes with equals the trainer's weights, by hash.

The trainer's side of the comparison is hashed from the weights that its own modules compute with, tensor by tensor, and
under every name that a tied tensor has. A difference is answered by sending everything once more, and then ends the
run, naming the tensors.
"""

import hashlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from training.engine import Engine
from training.engine.ledger import PrecisionError
from training.engine.tensors import whole_weight
from training.rollouts.transformers_sampler import TransformersSampler, digest

_ATTEMPTS = 2
_NAMED = 5


class NotSynced(PrecisionError):
    """The sampler computes with other weights than the trainer."""


class Synced(NamedTuple):
    """A sync that was proven."""

    version: str
    """Hash over names and hashes of all tensors: of these weights and no others."""
    tensors: int
    seconds: float


def synchronise(engine: Engine, sampler: TransformersSampler) -> Synced:
    """Send the trainer's weights and prove that the sampler computes with them. A collective. Raises NotSynced."""
    started, wrong = time.perf_counter(), list[str]()
    for _ in range(_ATTEMPTS):
        expected: dict[str, str] = {}
        sampler.receive(_weights(engine, expected))
        held = sampler.digests()
        own = sorted(name for name in expected if held.get(name) != expected[name])
        wrong = sorted({name for names in engine.world.gather_objects(own) for name in names})
        if not wrong:
            break
    else:
        shown = ", ".join(wrong[:_NAMED]) + (f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else "")
        raise NotSynced(
            f"the sampler computes with other weights than the trainer in {len(wrong)} of {len(expected)} tensors, "
            f"after they were sent {_ATTEMPTS} times: {shown}; nothing was sampled"
        )
    text = "\n".join(f"{name} {expected[name]}" for name in sorted(expected))
    version = hashlib.sha256(text.encode()).hexdigest()
    return Synced(version, len(expected), time.perf_counter() - started)


def _weights(engine: Engine, expected: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter's whole weight under each of its names, whose digest goes into `expected`."""
    known: dict[int, str] = {}
    for name, parameter in engine.model.named_parameters(remove_duplicate=False):
        whole = whole_weight(engine, parameter)
        expected[name] = known[id(parameter)] = known.get(id(parameter)) or digest(whole)
        yield name, whole
