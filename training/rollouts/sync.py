"""Guarantee 1: before a token is sampled, what the sampler computes with equals the trainer's weights, by hash.

The trainer's side of the comparison is the weights that its own modules compute with, tensor by tensor, and under every
name that a tied tensor has. Each rank hashes a share of them; a copy in this process is compared bit for bit, and so
are the numbers that modules compute with beside their weights. A difference is answered by sending everything once
more, and then ends the run, naming the tensors.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from training.engine import Engine
from training.engine.flips import bit_sum
from training.engine.ledger import PrecisionError
from training.engine.tensors import whole_weight
from training.rollouts.transformers_sampler import TransformersSampler, differing_from, digest

_ATTEMPTS = 2
_NAMED = 5


def synchronise(engine: Engine, sampler: TransformersSampler) -> str:
    """Send the trainer's weights and prove that the sampler computes with them. A collective. Raises PrecisionError.

    The version of these weights and no others: a hash over names and hashes of all tensors.
    """
    world, numbers = engine.world, _numbers(engine.model)
    other = [name for name, value in _numbers(sampler.model).items() if numbers.get(name, value) != value]
    if other:
        raise PrecisionError(f"the sampler has other settings than the trainer: {_shown(other)}; nothing was sampled")
    for _ in range(_ATTEMPTS):
        share: dict[str, str] = {}
        sampler.receive(_weights(engine, share, sampler.frozen))
        expected = {name: known for part in world.gather_objects(share) for name, known in part.items()}
        own = sampler.differing(_weights(engine), expected)
        wrong = sorted({name for names in world.gather_objects(own) for name in names})
        if not wrong:
            text = "\n".join(f"{name} {expected[name]}" for name in sorted(expected))
            return hashlib.sha256(text.encode()).hexdigest()
    raise PrecisionError(
        f"the sampler computes with other weights than the trainer in {len(wrong)} of {len(expected)} tensors, "
        f"after they were sent {_ATTEMPTS} times: {_shown(wrong)}; nothing was sampled"
    )


def require_start(engine: Engine, reference: PreTrainedModel) -> None:
    """Prove that the model of grpo.beta has the weights and dtypes that the engine starts with. Raises
    PrecisionError."""
    wrong = differing_from(reference, _weights(engine))
    if wrong:
        raise PrecisionError(
            f"the reference of grpo.beta has another dtype or other weights than the trainer at the start in "
            f"{len(wrong)} tensors: {_shown(wrong)}; nothing was sampled"
        )


def bit_sums(model: PreTrainedModel) -> list[int]:
    """A sum over the bits of each weight: one that changes has another."""
    found: list[int] = torch.stack([bit_sum(value.view(-1)) for value in model.parameters()]).tolist()
    return found


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _numbers(model: torch.nn.Module) -> dict[str, Any]:
    """Inputs of modules' computations besides weights: numbers, such as an adapter's scale or a window, and buffers."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if {"dynamic", "longrope"} & {getattr(module, "rope_type", None)}:  # which depend on what was computed before
            continue
        for key, value in vars(module).items():
            kinds = {type(part) for part in (value.values() if type(value) is dict else [value])}
            if kinds and kinds <= {int, float}:
                found[f"{name}.{key}"] = value
        for key, buffer in module.named_buffers(recurse=False):
            found[f"{name}.{key}"] = int(bit_sum(buffer.detach().clone().view(-1)))
    return found


def _weights(
    engine: Engine, share: dict[str, str] | None = None, frozen: dict[str, str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter's whole weight under each of its names.

    share: takes the digests that this rank computes. frozen: those of weights that are not trained, once computed.
    """
    named = list(engine.model.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, parameter in named:
        names.setdefault(id(parameter), []).append(name)
    mine = list(names)[engine.world.rank :: engine.world.world_size]
    for name, parameter in named:
        tied = names[id(parameter)]
        whole = whole_weight(engine, parameter) if engine.stage == 3 else parameter.data  # whole_weight copies
        if share is not None and frozen is not None and id(parameter) in mine and name == tied[0]:
            known = frozen.get(name) or digest(whole)
            frozen |= {} if parameter.requires_grad else {name: known}
            share |= dict.fromkeys(tied, known)
        yield name, whole
