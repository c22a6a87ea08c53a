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


def require_start(engine: Engine, reference: PreTrainedModel) -> dict[str, int]:
    """Prove that the model of grpo.beta has the weights and dtypes that the engine starts with; for
    `require_unchanged`. Raises PrecisionError."""
    other = "another dtype or other weights than the trainer at the start"
    _require_none(differing_from(reference, _weights(engine)), other)
    return _bit_sums(reference)


def require_unchanged(reference: PreTrainedModel, start: dict[str, int]) -> None:
    """Raises PrecisionError where the model of grpo.beta has other weights than `require_start` found."""
    changed = [name for name, now in _bit_sums(reference).items() if now != start[name]]
    _require_none(changed, "other weights than it had at the start")


def _bit_sums(model: PreTrainedModel) -> dict[str, int]:
    named = dict(model.named_parameters())
    sums = torch.stack([bit_sum(value.view(-1)) for value in named.values()])
    return dict(zip(named, sums.tolist(), strict=True))


def _require_none(wrong: Sequence[str], what: str) -> None:
    if wrong:
        where = f"{len(wrong)} tensors: {_shown(wrong)}"
        raise PrecisionError(f"the reference of grpo.beta has {what} in {where}; nothing was learned")


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _numbers(model: torch.nn.Module) -> dict[str, Any]:
    """Numbers that modules compute with beside their weights, such as an adapter's scale, an eps or a window."""
    named = ((f"{name}.{key}", value) for name, module in model.named_modules() for key, value in vars(module).items())
    kinds = {int, float}
    return {
        name: value
        for name, value in named
        if type(value) in kinds or (type(value) is dict and value and {type(part) for part in value.values()} <= kinds)
    }


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
